"""Questions of operators, as runs of the simulation: each function gives rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.replicas.simulation.cluster import Autoscaling, Cluster, Outcome, capacity, simulate
from benchmarks.replicas.simulation.routing import Policy
from benchmarks.replicas.simulation.times import ServiceTimes
from benchmarks.replicas.simulation.workload import Request, Workload

POLICIES: tuple[Policy, ...] = ("affinity", "least_of_two", "random")
PER_NODE = 8
"""Replicas of a node; each node has one proxy."""
PREFIXES = 12
"""Prefixes for each replica: somewhat more than its cache has room for."""
WORKLOAD = Workload(prefixes=PREFIXES, prefix_tokens=512, own_tokens=32, new_tokens=32)
WARM = 1 / 3
"""The first requests fill the caches and are not counted."""
WINDOW_S = 2.0
TARGET = 8.0
"""Ongoing requests of a replica that autoscaling aims at."""
BEFORE_S = 10.0
Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Service times and the sizes of the runs: ``requests`` per replica, for at least ``least`` of them."""

    times: ServiceTimes
    requests: int = 40
    least: int = 40

    @property
    def rate(self) -> float:
        """Requests per second of one replica when every prefix is cached."""
        return capacity(self.times, replace(WORKLOAD, prefixes=1))

    @property
    def limit_s(self) -> float:
        """Seconds that a good answer may take: three times those of a single request."""
        (alone,) = simulate(Cluster(self.times, 1), [Request(0.0, 0, 512, 32, 32)]).requests
        return 3 * alone.end

    def lasting(self, seconds: float, load: float) -> Bench:
        """The same with runs of so many seconds."""
        return replace(self, requests=round(seconds * load * self.rate), least=1)

    def run(self, load: float, cluster: Cluster, seed: int = 0, surge: tuple[float, float] | None = None) -> Outcome:
        """``load`` of ``rate`` per replica, after a warm-up that is not counted."""
        workload = replace(WORKLOAD, prefixes=PREFIXES * cluster.replicas)
        count = self.requests * max(cluster.replicas, self.least)
        return simulate(cluster, workload.requests(load * self.rate * cluster.replicas, count, seed, surge))

    def of(self, replicas: int, policy: Policy = "affinity", **options: Any) -> Cluster:
        """A cluster with a proxy on each node."""
        return replace(Cluster(self.times, replicas, policy, proxies=-(-replicas // PER_NODE)), **options)


def by_replicas(bench: Bench, counts: Sequence[int], load: float) -> Rows:
    """More and more replicas, each with the same load and the same number of prefixes."""
    for policy in POLICIES:
        for count in counts:
            outcome = bench.run(load, bench.of(count, policy))
            yield {"policy": policy, "replicas": count, **_figures(bench, outcome)}


def by_load(bench: Bench, replicas: int, loads: Sequence[float]) -> Rows:
    """Goodput: answers within the limit, per replica and second."""
    for policy in POLICIES:
        for load in loads:
            outcome = bench.run(load, bench.of(replicas, policy))
            yield {"policy": policy, "load": load, "offered": load * bench.rate, **_figures(bench, outcome)}


def by_proxies(bench: Bench, replicas: int, proxies: Sequence[int], load: float) -> Rows:
    """More and more proxies: each knows less of the loads, and what it knows is older."""
    for policy in POLICIES[:2]:
        for count in proxies:
            outcome = bench.run(load, bench.of(replicas, policy, proxies=count))
            asked = len(outcome.ages) + outcome.forgotten
            yield {
                "policy": policy,
                "proxies": count,
                "age_s": float(np.mean(outcome.ages)),
                "unknown": outcome.forgotten / asked,
                **_figures(bench, outcome),
            }


def after_a_loss(bench: Bench, replicas: int, lost: int, load: float) -> Rows:
    """Over time: a node with ``lost`` replicas ends; others take their place after the time of a start."""
    start_s = bench.times.start_s
    long = bench.lasting(5 * start_s, load)
    for policy in POLICIES[:2]:
        outcome = long.run(load, bench.of(replicas, policy, lost=(2 * start_s, lost, start_s)))
        for row in _over_time(outcome, 2 * start_s):
            yield {"policy": policy, "retried": outcome.retried, **row}


def after_a_surge(bench: Bench, replicas: int, factor: float, load: float, delays: Sequence[float]) -> Rows:
    """Over time: the rate rises by ``factor``; Serve adds replicas after a delay and the time of a start."""
    at = 20.0
    after_s = max(delays) + 4 * bench.times.start_s
    long = bench.lasting(at + factor * after_s, load)
    for delay in delays:
        rule = Autoscaling(round(1.5 * factor * replicas), TARGET, window_s=max(delay, 1.0), delay_s=delay)
        outcome = long.run(load, bench.of(replicas, autoscaling=rule), surge=(at, factor))
        for row in _over_time(outcome, at):
            yield {"delay_s": delay, "replicas": max(count for _, count in outcome.replicas), **row}


def _figures(bench: Bench, outcome: Outcome) -> dict[str, float]:
    """Over the requests after the warm-up."""
    counted = outcome.requests[round(len(outcome.requests) * WARM) :]
    good = sum(request.outcome == "done" and request.end - request.arrival <= bench.limit_s for request in counted)
    replicas = outcome.replicas[0][1]
    return {
        **_latencies(counted),
        "goodput": good / (counted[-1].arrival - counted[0].arrival) / replicas,
    }


def _latencies(requests: Sequence[Request]) -> dict[str, float]:
    done = [request for request in requests if request.outcome == "done"]
    first = np.percentile([request.first - request.arrival for request in done], [50, 99])
    whole = np.percentile([request.end - request.arrival for request in done], [50, 99])
    return {
        "hits": float(np.mean([request.cached_tokens > 0 for request in done])),
        "first_p50_s": float(first[0]),
        "first_p99_s": float(first[1]),
        "whole_p50_s": float(whole[0]),
        "whole_p99_s": float(whole[1]),
        "refused": 1 - len(done) / len(requests),
    }


def _over_time(outcome: Outcome, at: float) -> Rows:
    """Latencies of the requests of each window from shortly before the event ``at``, from which seconds count."""
    windows: dict[int, list[Request]] = {}
    for request in outcome.requests:
        windows.setdefault(int((request.arrival - at) // WINDOW_S), []).append(request)
    for number, requests in sorted(windows.items()):
        if number * WINDOW_S >= -BEFORE_S and any(request.outcome == "done" for request in requests):
            yield {"seconds": (number + 0.5) * WINDOW_S, **_latencies(requests)}
