"""The simulation against two real replicas: the same requests at the same times, throughput and latency compared.

The replicas are plain servers. This process chooses between them by the project's own ring, as the proxy does on Ray
Serve. Service times come from bursts on the same servers. The slowdown by other processes is measured while the
requests run: Linux counts the time that threads wait for a processor.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import httpx
import numpy as np

from benchmarks.replicas.simulation.cluster import Cluster, capacity, simulate
from benchmarks.replicas.simulation.processes import Threads, busiest, slowdown, threads
from benchmarks.replicas.simulation.replica import Slowdown
from benchmarks.replicas.simulation.routing import Proxy
from benchmarks.replicas.simulation.times import ServiceTimes, fitted
from benchmarks.replicas.simulation.workload import Request, Workload
from benchmarks.replicas.simulation_times import SETTINGS, generate, measured, tokens
from benchmarks.servers.load import Served, server
from benchmarks.timing import Report
from service.scale.proxy.ring import Ring

REPLICAS = 2
WORKLOAD = Workload(prefixes=24, prefix_tokens=512, own_tokens=32, new_tokens=32)
LOADS = {"60 % load": 0.6, "overload": 4.0}
"""Arrivals per second, as a share of what the replicas can answer."""
SAMPLE_S = 1.0
IDLE = 0.02
"""A replica that spends less of a sample on a processor is idle: the slowdown before it goes on."""
SLACK = 1.25
HITS = re.compile(r"^\w*prefix_cache_hits_total{.*} (.+)$", re.M)


def run(quick: bool = False) -> Report:
    """Each load in turn, several rounds; latencies of all rounds are pooled."""
    report = Report(
        "simulation_check",
        f"the simulation against {REPLICAS} real replicas behind the project's ring, demo model, one thread each",
        ("load", "what", "real", "simulated", "simulated / real", "of single rounds"),
    )
    rounds, count = (1, 10) if quick else (4, 80)
    with ExitStack() as stack:
        served = [stack.enter_context(server(SETTINGS)) for _ in range(REPLICAS)]
        compared = asyncio.run(_compared(served, rounds, count))
    report.numbers = {}
    for name, pairs in compared.items():
        real, simulated = (_figures([pair[side] for pair in pairs]) for side in (0, 1))
        report.numbers[name] = {"real": real, "simulated": simulated}
        rounds_of = [(_figures([pair[0]]), _figures([pair[1]])) for pair in pairs]
        for what, value in real.items():
            ratios = [b[what] / a[what] for a, b in rounds_of]
            spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
            report.add(name, what, value, simulated[what], f"{simulated[what] / value:.2f}", spread)
    slow = [pair[2] for pairs in compared.values() for pair in pairs]
    report.notes.append(
        f"{rounds} rounds of {count} requests per load. The machine was busy: replicas took {min(slow):.1f} to "
        f"{max(slow):.1f} times their CPU time (mean of a round)"
    )
    return report


@dataclass
class Run:
    """Ends of one run: seconds of each answer, seconds from the first arrival to the last end, share of hits."""

    latencies: list[float]
    whole_s: float
    hits: float


Pairs = list[tuple[Run, Run, float]]
Sample = tuple[float, list[Threads]]
"""Seconds, and the threads of each replica."""


async def _compared(served: Sequence[Served], rounds: int, count: int) -> dict[str, Pairs]:
    """Load -> (real, simulated, mean slowdown) of each round."""
    compared: dict[str, Pairs] = {name: [] for name in LOADS}
    for number in range(rounds):
        samples: list[Sample] = [(0.0, [threads(replica.pid) for replica in served])]
        found, _ = fitted(await measured(served, 1, seed=number))
        samples.append((1.0, [threads(replica.pid) for replica in served]))
        slow = float(np.mean([now.factors[0] for now in _slowdowns(samples)]))
        times = ServiceTimes(**found, start_s=0.0, cache_tokens=SETTINGS["cache_tokens"])
        for load, (name, share) in enumerate(LOADS.items()):
            rate = share * REPLICAS * capacity(times, WORKLOAD) / slow
            seed = 100 * load + number
            trace = WORKLOAD.requests(rate, count, seed)
            real, slowdowns = await _replayed(served, [replace(request) for request in trace], seed)
            slow = float(np.mean([now.factors[0] for now in slowdowns]))
            compared[name].append((real, _simulated(times, trace, slowdowns), slow))
    return compared


def _simulated(times: ServiceTimes, trace: Sequence[Request], slow: Sequence[Slowdown]) -> Run:
    asked = [replace(request) for request in trace]
    simulate(Cluster(times, len(slow), slack=SLACK, slowdowns=slow), asked)
    return _run_of(asked)


async def _replayed(served: Sequence[Served], trace: list[Request], seed: int) -> tuple[Run, list[Slowdown]]:
    """The real run, with prefixes that no replica has seen, and the slowdown of each replica meanwhile."""
    names = {f"replica {number}": replica for number, replica in enumerate(served)}
    proxy = Proxy("affinity", SLACK, 10.0, random.Random(seed))
    proxy.update(Ring(list(names)), list(names))
    prefixes = [tokens(random.Random(f"{seed} {n}"), WORKLOAD.prefix_tokens) for n in range(WORKLOAD.prefixes)]
    noise, busy = random.Random(seed), dict.fromkeys(names, 0)
    began = time.perf_counter()

    async def one(request: Request) -> None:
        await asyncio.sleep(request.arrival - (time.perf_counter() - began))
        now = time.perf_counter() - began
        name = proxy.choose(now, request.prefix, busy.__getitem__)
        busy[name] += 1
        proxy.hear(now, name, busy[name])
        prompt = prefixes[request.prefix] + tokens(noise, request.own_tokens)
        await generate(client, names[name].url, prompt, request.new_tokens)
        request.end, request.outcome = time.perf_counter() - began, "done"
        busy[name] -= 1
        proxy.ended(request.end, name)

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        hits = await _hits(client, served)
        samples: list[Sample] = []
        watching = asyncio.create_task(_watch(served, began, samples))
        try:
            await asyncio.gather(*map(one, trace))
        finally:
            watching.cancel()
        hits = await _hits(client, served) - hits
    real = _run_of(trace)
    real.hits = hits / sum(request.prefix_tokens for request in trace)
    return real, _slowdowns(samples)


async def _hits(client: httpx.AsyncClient, served: Sequence[Served]) -> float:
    """Prompt tokens that the replicas have found in their caches so far."""
    pages = [(await client.get(f"{replica.url}/metrics")).text for replica in served]
    return sum(
        float(value) for page in pages for value in re.findall(r"^\w*prefix_cache_hits_total{.*} (.+)$", page, re.M)
    )


async def _watch(served: Sequence[Served], began: float, samples: list[Sample]) -> None:
    while True:
        samples.append((time.perf_counter() - began, [threads(replica.pid) for replica in served]))
        await asyncio.sleep(SAMPLE_S)


def _slowdowns(samples: Sequence[Sample]) -> list[Slowdown]:
    """Of the generation thread of each replica, which is its busiest, between two samples."""
    found = []
    for looks in zip(*(looks for _, looks in samples), strict=True):
        thread = busiest(looks[0], looks[-1])
        since, factors = [0.0], [slowdown(looks[0][thread], looks[-1][thread])]
        for (at, _), (before, after) in zip(samples, itertools.pairwise(looks), strict=False):
            if after[thread][0] - before[thread][0] > IDLE * SAMPLE_S:
                since.append(at)
                factors.append(slowdown(before[thread], after[thread]))
        found.append(Slowdown(since, factors))
    return found


def _run_of(asked: Sequence[Request]) -> Run:
    assert all(request.outcome == "done" for request in asked)
    hits = sum(request.cached_tokens for request in asked) / sum(request.prefix_tokens for request in asked)
    ends = [request.end for request in asked]
    return Run([request.end - request.arrival for request in asked], max(ends) - asked[0].arrival, hits)


def _figures(runs: Sequence[Run]) -> dict[str, float]:
    """The compared numbers, over all rounds."""
    latencies = [seconds for run in runs for seconds in run.latencies]
    p50, p99 = np.percentile(latencies, [50, 99])
    return {
        "requests per second": len(latencies) / sum(run.whole_s for run in runs),
        "latency p50, s": float(p50),
        "latency p99, s": float(p99),
        "prefix tokens from the cache": float(np.mean([run.hits for run in runs])),
    }
