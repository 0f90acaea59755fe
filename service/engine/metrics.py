"""Metrics of one model's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from prometheus_client.metrics import MetricWrapperBase

from service.engine.generation import Generation
from service.metrics import Metrics

Labelled = TypeVar("Labelled", bound=MetricWrapperBase)


class EngineMetrics:
    """Counts one engine's tokens and times. ``method`` is the value of the label ``pe_method``."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._all, self._model = metrics, model_name
        self._labelled: dict[tuple[MetricWrapperBase, str], Any] = {}
        self._all.restarts.labels(model_name)  # begins at 0: an alert sees the first one

    def serves(self, engine: str, attention: str, ranks: int, *, graphs: bool) -> None:
        """The engine, its attention, its graphs and the processes that compute together, which stay."""
        self._all.engine_info.labels(self._model, engine, attention, str(graphs).lower(), str(ranks)).set(1)

    def step(self, graph: str, variant: str) -> None:
        """A step of the paged engine: what it had of a graph, and the variant of its kernel."""
        self._all.steps.labels(self._model, graph, variant).inc()

    def first_token(self, method: str, generation: Generation, prompt_tokens: int) -> None:
        labels = (self._model, method)
        self._all.prompt_tokens.labels(*labels).inc(prompt_tokens)
        self._all.cached_tokens.labels(*labels).inc(generation.cached_tokens)
        self._all.first_token.labels(*labels).observe(generation.elapsed_s)

    def next_token(self, method: str, gap_s: float) -> None:
        """``gap_s`` seconds have passed since the token before."""
        self._of(self._all.inter_token, method).observe(gap_s)

    def generated(self, method: str, tokens: int) -> None:
        self._of(self._all.generation_tokens, method).inc(tokens)

    def _of(self, metric: Labelled, method: str) -> Labelled:
        """``metric`` with its labels, looked up once: a server counts thousands of tokens per second."""
        if (metric, method) not in self._labelled:
            self._labelled[metric, method] = metric.labels(self._model, method)
        labelled: Labelled = self._labelled[metric, method]
        return labelled

    def finished(self, method: str, generation: Generation, reason: str, seconds: float) -> None:
        labels = (self._model, method)
        self._all.success.labels(*labels, reason).inc()
        if reason in ("stop", "length"):
            self._all.e2e.labels(*labels).observe(seconds)
            self._all.queue.labels(*labels).observe(generation.queue_s)
            self._all.prefill.labels(*labels).observe(generation.prefill_s)
            self._all.decode.labels(*labels).observe(generation.decode_s)

    def scored(self, tokens: Mapping[str, int]) -> None:
        """Tokens that forward passes read, by method."""
        for method, count in tokens.items():
            self._all.scored_tokens.labels(self._model, method).inc(count)

    def restarted(self) -> None:
        self._all.restarts.labels(self._model).inc()
