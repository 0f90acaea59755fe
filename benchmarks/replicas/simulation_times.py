"""Service times of one replica on the demo model, by which the simulation of many replicas runs.

A server gets bursts of requests that differ in number, prompt tokens and new tokens. This module fits their CPU
times by least squares. The fit has the times of a step, of a sequence in it, of a prompt token and a request.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from benchmarks.replicas.simulation.processes import cpu_s
from benchmarks.replicas.simulation.times import Burst, ServiceTimes, fitted
from benchmarks.servers.load import Served, server
from benchmarks.timing import Report
from service.models.checkpoint.loading import DEMO

SETTINGS: dict[str, Any] = {
    "model": DEMO / "ropeway-demo",
    "port": 0,
    "threads": 1,
    "cache_tokens": 8192,
    "dtype": "float32",
}
"""One thread of torch, so that the CPU time of a step is its time on an idle machine."""

SHAPES: tuple[tuple[int, int, int], ...] = (
    *((1, prompt, 1) for prompt in (32, 256, 544, 992)),
    *((requests, 32, 32) for requests in (1, 2, 4, 8, 12)),
    *((requests, 544, 32) for requests in (1, 2, 4, 8)),
    (8, 256, 16),
    (2, 992, 32),
)
"""(requests at once, prompt tokens, new tokens) of the bursts."""


def run(quick: bool = False) -> Report:
    """Every burst in turn, several rounds; the medians are fitted."""
    report = Report(
        "simulation_times",
        "CPU time of one replica, demo model, one thread of torch: bursts of requests and a fit to them",
        ("what", "value", "remark"),
    )
    began = time.perf_counter()
    with server(SETTINGS) as served:
        start_s = time.perf_counter() - began
        start_cpu_s = cpu_s(served.pid)
        bursts = asyncio.run(measured([served], 1 if quick else 5))
    found, error = fitted(bursts)
    times = ServiceTimes(**found, start_s=start_cpu_s, cache_tokens=SETTINGS["cache_tokens"])
    for name, unit in (("request_s", "request"), ("step_s", "step"), ("decode_s", "sequence of a step")):
        report.add(name, f"{1e3 * getattr(times, name):.2f} ms", f"per {unit}")
    report.add("read_s", f"{1e6 * times.read_s:.2f} us", "per cached token that a sequence of a step attends to")
    report.add("prefill_s", f"{1e6 * times.prefill_s:.1f} us", "per prompt token that is not cached")
    report.add("start_s", f"{times.start_s:.1f} s", f"to readiness; {start_s:.1f} s on the clock on this busy machine")
    report.add("cache_tokens", times.cache_tokens, "capacity")
    report.add("fit", f"{100 * error:.0f} %", f"root mean square of the relative errors of {len(bursts)} bursts")
    report.numbers = {"times": asdict(times), "bursts": [asdict(burst) for burst in bursts]}
    return report


async def measured(replicas: Sequence[Served], rounds: int, seed: int = 0) -> list[Burst]:
    """The median CPU time of every burst; all replicas work at once."""
    noise = random.Random(seed)
    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(_burst(client, replica, noise, *SHAPES[-1]) for replica in replicas))  # warms up
        seconds: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in SHAPES}
        for shape in itertools.chain.from_iterable(noise.sample(SHAPES, len(SHAPES)) for _ in range(rounds)):
            seconds[shape] += await asyncio.gather(*(_burst(client, replica, noise, *shape) for replica in replicas))
    return [Burst(*shape, statistics.median(found)) for shape, found in seconds.items()]


async def _burst(
    client: httpx.AsyncClient, replica: Served, noise: random.Random, requests: int, prompt: int, new: int
) -> float:
    """CPU seconds of the replica."""
    before = cpu_s(replica.pid)
    await asyncio.gather(*(generate(client, replica.url, tokens(noise, prompt), new) for _ in range(requests)))
    return cpu_s(replica.pid) - before


def tokens(noise: random.Random, count: int) -> list[int]:
    """A random prompt, new to every cache."""
    return [noise.randrange(3, 2000) for _ in range(count)]


async def generate(client: httpx.AsyncClient, url: str, prompt: list[int], new_tokens: int) -> Mapping[str, Any]:
    """The answer of one request."""
    body = {"prompt": prompt, "max_new_tokens": new_tokens, "ignore_eos": True}
    answer = await client.post(f"{url}/generate", json=body)
    answer.raise_for_status()
    result: Mapping[str, Any] = answer.json()
    return result
