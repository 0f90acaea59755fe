"""Prometheus metrics. The names after the prefix are vLLM's, which dashboards and the Kubernetes gateway know.

Every application has a separate registry, so that several can live in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Loads = Callable[[], Mapping[str, Mapping[str, int]]]
"""The load of every engine, by the name of its model."""

LABELS = ("model_name", "pe_method")

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
REASONS = (
    *("queue_full", "slots_exhausted", "internal_error", "engine_failed", "out_of_memory", "not_a_number"),
    *("jobs_out_of_reach", "limits_out_of_reach"),
)
"""Codes that alerts name. A series that begins at 1 has no increase, so theirs begin at 0."""

SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """All metrics of one application. ``pe_method`` takes the names of methods and nothing else. With ``replica``,
    every sample has that label."""

    def __init__(self, replica: str | None = None) -> None:
        self.registry = CollectorRegistry() if replica is None else _ReplicaRegistry(replica)
        self.port: int | None = None
        ProcessCollector(registry=self.registry)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.scored_tokens = self._counter(
            "perplexity_tokens", "Tokens read by forward passes of evaluations and of scored prompts."
        )
        self.success = self._counter(
            "request_success", "Sequences ended, by why: stop, length, abort, error.", (*LABELS, "finished_reason")
        )
        self.rejected = self._counter(
            "requests_rejected",
            "Requests answered with an error, by its code, or left by their client: client_disconnected.",
            ("reason",),
        )
        for reason in REASONS:
            self.rejected.labels(reason)
        self.restarts = self._counter("engine_restarts", "Generation threads replaced.", ("model_name",))
        self.jobs_out_of_reach = Gauge(
            "ropeway_jobs_out_of_reach",
            "1 while the database of jobs does not answer, and jobs wait.",
            registry=self.registry,
        )
        self.engine_info = Gauge(
            "ropeway_engine_info",
            "1 for the engine, the attention, CUDA graphs or not, and the number of ranks that serve a model.",
            ("model_name", "engine", "attention", "cuda_graphs", "tensor_parallel"),
            registry=self.registry,
        )
        self.steps = self._counter(
            "engine_steps",
            "Steps of the paged engine, by their CUDA graph or list of calls, and the variant of the kernel.",
            ("model_name", "graph", "variant"),
        )
        self.first_token = self._histogram("time_to_first_token", "From admission to the first token.", SLOW)
        self.inter_token = self._histogram("inter_token_latency", "Between two tokens of a sequence.", FAST)
        self.e2e = self._histogram("e2e_request_latency", "From admission to the last token.", SLOW)
        self.queue = self._histogram("request_queue_time", "Waiting for memory and for a place in a batch.", SLOW)
        self.prefill = self._histogram("request_prefill_time", "From the first step to the first token.", SLOW)
        self.decode = self._histogram("request_decode_time", "From the first token to the last.", SLOW)

    def _counter(self, name: str, text: str, labels: Iterable[str] = LABELS) -> Counter:
        return Counter(f"ropeway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ropeway_{name}_seconds", text, LABELS, registry=self.registry, buckets=buckets)

    def watch(self, loads: Loads) -> None:
        """Read ``loads`` at every scrape."""
        self.registry.register(_Load(loads))


class _ReplicaRegistry(CollectorRegistry):
    """A registry that adds the label ``replica`` to its samples."""

    def __init__(self, replica: str) -> None:
        super().__init__()
        self._replica = replica

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [
                sample._replace(labels=sample.labels | {"replica": self._replica}) for sample in metric.samples
            ]
            yield metric


class _Load(Collector):
    """Gauges with the meaning that the gateway inference extension expects, read when asked for."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        loads = self._loads()
        gauges = {
            "num_requests_running": ("Sequences in the running batch.", lambda load: load["running"]),
            "num_requests_waiting": ("Sequences waiting for memory or for a place.", lambda load: load["waiting"]),
            "num_scoring_jobs": ("Evaluations and scored prompts that run.", lambda load: load["scoring"]),
            "kv_cache_usage_perc": (
                "Share of the paged cache that requests hold, 0 to 1. Kept prefixes are free.",
                lambda load: load["cache_tokens_used"] / max(load["cache_tokens"], 1),
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"ropeway_{name}", text, labels=["model_name"])
            for model, load in loads.items():
                gauge.add_metric([model], value(load))  # type: ignore[no-untyped-call]
            yield gauge
