"""Prompt tokens found in the caches of two replicas, by affinity and by Ray Serve's own router.

``python -m benchmarks affinity``. Each round starts `ropeway serve --replicas 2` on the demo model with one router, and
then with the other. Prompts begin with one of many shared prefixes: the cache of one replica cannot have all.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.servers.load import percentiles
from benchmarks.timing import Report

REPLICAS = 2
PREFIXES, PREFIX, REST, NEW = 20, 512, 32, 4
"""Shared prefixes, tokens of each, further tokens of a prompt, and new tokens: 10240 tokens of prefixes."""
CACHE = 8192
"""Tokens in the cache of one replica: half of the prefixes and the running prompts."""
CLIENTS, ASKED, ROUNDS = 4, 240, 3

HITS, PROMPT = "ropeway_prefix_cache_hits_total", "ropeway_prompt_tokens_total"
STARTED = "process_start_time_seconds"

SERVE = """
import sys
from service.scale import options
ours = options.deployment
def default(*settings, **resources):
    return {name: value for name, value in ours(*settings, **resources).items() if name != "request_router_config"}
if sys.argv.pop(1) == "default":
    options.deployment = default
from service.cli import app
app()
"""
"""`ropeway` with the router that its first argument names; the service has no setting for this."""


@dataclass
class Measured:
    """Answers of one router: seconds of each, and prompt tokens in all and from a cache, by round."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


def run(quick: bool = False) -> Report:
    """Rounds of both routers in turn, the first one changing; without Ray, the reason alone."""
    report = Report(
        "affinity",
        f"{PREFIXES} prefixes of {PREFIX} tokens, {REPLICAS} replicas with {CACHE} tokens of cache, {CLIENTS} clients",
        ("what", "affinity", "Ray's default", "ratio", "goal"),
    )
    if find_spec("ray") is None:
        report.notes.append("not measured: Ray is not installed, the extra `scale` has it")
        return report
    found = {"affinity": Measured(), "default": Measured()}
    rounds, asked = (1, 40) if quick else (ROUNDS, ASKED)
    for number in range(rounds):
        for router in sorted(found, reverse=bool(number % 2)):
            with _replicas(router) as url:
                _measure(url, found[router], asked, random.Random(number))
    _fill(report, found["affinity"], found["default"])
    report.notes.append(f"{rounds} rounds of {asked} requests, {NEW} new tokens each; caches are empty at each start")
    return report


@contextmanager
def _replicas(router: str) -> Iterator[str]:
    """URL of the demo model on two replicas with ``router``.

    Raises:
        RuntimeError: when they do not start; their log is the message.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        given = {
            "model": "demo",
            "port": 0,
            "replicas": REPLICAS,
            "cache_tokens": CACHE,
            "database_url": f"sqlite:///{folder}/jobs.db",
        }
        flags = [f"--set={name}={value}" for name, value in given.items()]
        command = [sys.executable, "-c", SERVE, router, "serve", *flags]
        running = psutil.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield _url_in(Path(log.name), running)
        finally:
            if running.poll() is None:
                processes = [running, *running.children(recursive=True)]
                running.terminate()
                for process in psutil.wait_procs(processes, timeout=60)[1]:
                    process.kill()


def _url_in(log: Path, running: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 300
    while running.poll() is None and time.monotonic() < until:
        if found := re.search(r"replicas_ready.*(http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"the replicas did not start: {log.read_text()[-2000:]}")


def _measure(url: str, measured: Measured, asked: int, noise: random.Random) -> None:
    """Send ``asked`` requests, each with a random one of the prefixes, from all clients."""
    prefixes = [[noise.randrange(5, 200) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    prompts = [noise.choice(prefixes) + [noise.randrange(5, 200) for _ in range(REST)] for _ in range(asked)]
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(CLIENTS) as pool:

        def send(prompt: list[int]) -> float:
            began = time.perf_counter()
            body = {"prompt": prompt, "max_new_tokens": NEW, "ignore_eos": True}
            client.post("/generate", json=body).raise_for_status()
            return time.perf_counter() - began

        measured.seconds += pool.map(send, prompts)
    counts = _counts(url)
    measured.tokens.append(counts[PROMPT])
    measured.cached.append(counts[HITS])


def _counts(url: str) -> dict[str, int]:
    """Both counters, summed over the replicas. Our proxy answers with those of all. Serve's answers with those of one,
    so it is asked until both have answered."""
    found: dict[tuple[str | None, float], dict[str, int]] = {}
    until = time.monotonic() + 60
    while len(found) < REPLICAS:
        if time.monotonic() > until:
            raise RuntimeError(f"only {len(found)} of {REPLICAS} replicas have answered /metrics")
        replicas: dict[str | None, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").raise_for_status().text):
            for sample in family.samples:
                replicas[sample.labels.get("replica")][sample.name] += sample.value
        for label, each in replicas.items():
            if STARTED in each:
                found[label, each[STARTED]] = {name: int(each[name]) for name in (HITS, PROMPT)}
    return {name: sum(counts[name] for counts in found.values()) for name in (HITS, PROMPT)}


def _fill(report: Report, ours: Measured, default: Measured) -> None:
    shares = [[hit / all_ for hit, all_ in zip(m.cached, m.tokens, strict=True)] for m in (ours, default)]
    ratios = sorted(mine / theirs for mine, theirs in zip(*shares, strict=True))
    mine, theirs = (f"{sum(m.cached) / sum(m.tokens):.1%}" for m in (ours, default))
    ratio = f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
    report.add("prompt tokens from a cache", mine, theirs, ratio, "at least 1.3")
    ends = [sorted(m.seconds)[int(0.99 * len(m.seconds))] for m in (ours, default)]
    both = [percentiles(m.seconds) for m in (ours, default)]
    report.add("whole answer, p50 / p95 / p99, s", *both, f"{ends[0] / ends[1]:.2f} of p99", "at most 1")
