"""The simulation of many replicas: no request lost, closed forms of queueing theory, and the reason for affinity."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.paths import RECORDED
from benchmarks.replicas.simulation.cluster import Autoscaling, Cluster, Outcome, simulate
from benchmarks.replicas.simulation.experiments import Bench, by_replicas
from benchmarks.replicas.simulation.times import Burst, ServiceTimes, fitted, recorded
from benchmarks.replicas.simulation.workload import Request, Workload

TIMES = ServiceTimes(
    request_s=0.002, step_s=0.006, decode_s=0.0005, read_s=1e-6, prefill_s=0.00005, start_s=8.0, cache_tokens=8192
)
SHORT = Workload(prefixes=60, prefix_tokens=256, new_tokens=8)


def run(workload: Workload = SHORT, rate: float = 120, count: int = 1500, **cluster: object) -> Outcome:
    of = Cluster(TIMES, 4)
    return simulate(replace(of, **cluster), workload.requests(rate, count, seed=3))  # type: ignore[arg-type]


def hit_rate(outcome: Outcome) -> float:
    return statistics.mean(request.cached_tokens > 0 for request in outcome.requests)


def waits(outcome: Outcome) -> list[float]:
    """Seconds from arrival to end of the answered requests."""
    return [request.end - request.arrival for request in outcome.requests if request.outcome == "done"]


@pytest.mark.parametrize("policy", ["affinity", "least_of_two", "random"])
def test_every_request_ends_once_though_replicas_die_and_queues_are_full(policy: str) -> None:
    full = replace(TIMES, max_queue=4, cache_tokens=1024, start_s=2.0)
    lost = (2.0, 3, 4.0)
    outcome = run(policy=policy, times=full, lost=lost, retries=1, proxies=2, autoscaling=Autoscaling(8, 4, 1.0, 1.0))
    counts = Counter(request.outcome for request in outcome.requests)
    assert {"done", "refused"} <= set(counts) <= {"done", "refused", "lost"}
    assert outcome.retried > 0
    for request in outcome.requests:
        assert request.end >= request.arrival
        assert (request.outcome == "done") == (not math.isnan(request.first) and request.first <= request.end)
    assert outcome.replicas[-1][1] > 4, "the autoscaler added some"


def test_without_retries_a_dead_replica_fails_its_own_requests_only() -> None:
    outcome = run(lost=(2.0, 1, 4.0), retries=0)
    lost = [request for request in outcome.requests if request.outcome == "lost"]
    assert 0 < len(lost) < 60
    assert all(request.arrival <= 2.0 and request.end == 2.0 for request in lost)


def test_the_same_seed_gives_the_same_run() -> None:
    ends = [[request.end for request in run(proxies=3, policy="least_of_two").requests] for _ in range(2)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_replica_without_batches_is_an_m_d_1_queue(load: float) -> None:
    """Mean wait by Pollaczek and Khinchine, load / (2 (1 - load)) services, within its confidence interval."""
    alone = replace(TIMES, request_s=0.0, max_requests_per_batch=1, max_queue=10**9, cache_tokens=10**9)
    workload = Workload(prefixes=1, prefix_tokens=0, own_tokens=100, new_tokens=1)
    service = alone.step(1, 100)
    means = []
    for seed in range(8):
        outcome = simulate(Cluster(alone, 1), workload.requests(load / service, 1200, seed))
        means.append(statistics.mean(waits(outcome)[200:]))
    expected = service * (1 + load / (2 * (1 - load)))
    error = statistics.stdev(means) / math.sqrt(len(means))
    assert abs(statistics.mean(means) - expected) < 3 * error
    assert error < 0.06 * expected


def test_affinity_raises_the_hit_rate() -> None:
    hits = {policy: hit_rate(run(policy=policy)) for policy in ("affinity", "least_of_two", "random")}
    assert hits["affinity"] > 1.3 * max(hits["least_of_two"], hits["random"])


def test_requests_decode_together() -> None:
    """Eight at once take the time of one step each round, not that of eight requests after one another."""
    one, eight = ([Request(0.0, 0, 0, 32, 32) for _ in range(count)] for count in (1, 8))
    ends = [max(request.end for request in simulate(Cluster(TIMES, 1), asked).requests) for asked in (one, eight)]
    attended = 32 + 16
    first = TIMES.step(1, 32, 1) + TIMES.step(8, 7 * 32, 7, attended)
    expected = first + 30 * TIMES.step(8, cached_tokens=8 * attended) + TIMES.step(7, cached_tokens=7 * attended)
    assert ends[1] == pytest.approx(expected)
    assert ends[1] < 2 * ends[0]


def test_a_long_prompt_is_read_in_chunks_beside_the_others() -> None:
    asked = [Request(0.0, 0, 0, 32, 64), Request(0.0, 1, 0, 3000, 2)]
    outcome = simulate(Cluster(TIMES, 1), asked)
    read = {"cached_tokens": 32 + 32}
    chunks = [TIMES.step(2, 1023, 1, **read), TIMES.step(2, 1023, **read), TIMES.step(2, 954, **read)]
    steps = [TIMES.step(1, 32, 1), *chunks]
    assert asked[1].first == pytest.approx(sum(steps))
    assert asked[0].first == pytest.approx(steps[0])
    assert outcome.busy_s == pytest.approx(asked[0].end)


def test_the_fit_finds_the_times_of_the_bursts() -> None:
    shapes = [(1, 32, 1), (1, 544, 1), (1, 32, 32), (4, 32, 32), (8, 256, 16), (2, 544, 32)]
    bursts = []
    for n, prompt, new in shapes:
        first = TIMES.step(n, n * prompt, n)
        others = TIMES.step(n, cached_tokens=n * (prompt + new / 2))
        bursts.append(Burst(n, prompt, new, first + (new - 1) * others))
    found, error = fitted(bursts)
    assert found == pytest.approx({name: getattr(TIMES, name) for name in found})
    assert error < 1e-9


def test_the_recorded_numbers_are_those_of_this_code() -> None:
    """Regenerate with: python -m benchmarks simulation_scale --record"""
    rows = json.loads((RECORDED / "simulation_scale.json").read_text(encoding="utf-8"))["replicas"]
    assert [rows[0]] == [
        pytest.approx(row) for row in by_replicas(Bench(recorded()), (1,), 0.5) if row["policy"] == "affinity"
    ]
