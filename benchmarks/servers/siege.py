"""A server under ten attacks at once: another tenant's requests, its job, memory, and the end.

``python -m benchmarks siege --seconds 60``. The server is another process, on the demo models. Each
attacker has a key, and so has the tenant that must not notice.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil

from benchmarks.servers.load import Display, Served, percentiles, server
from benchmarks.servers.siege_attacks import ATTACKS, finished
from benchmarks.timing import Report

VICTIM, WORKER = "victim", "worker"
"""Two tenants that must not notice: one generates, one has a job."""
GRACE_S = 10.0
REST_S = 15.0
"""After the siege, before memory is looked at."""
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "port": 0,
    "cache_tokens": 32768,
    "score_tokens": 32768,
    "log_format": "json",
    "shutdown_grace_s": GRACE_S,
    "send_timeout_s": 10,
    "api_keys": ",".join([VICTIM, WORKER, *(attack.__name__ for attack in ATTACKS)]),
}
SHORT: dict[str, Any] = {"prompt": [5, 6, 7, 8], "max_new_tokens": 8}
JOB: dict[str, Any] = {
    "evaluation": "perplexity",
    "methods": [{"method": "default"}, {"method": "linear", "factor": 4}],
    "lengths": [256, 512, 1024],
    "reuse": False,
}
FEWER: dict[str, Any] = {"max_tokens": 8192, "lengths": [256, 512]}
"""Less of it, for a quick siege."""
ALLOWED_MB = 1500
"""Beyond the idle server: 4 threads with up to 2 MB of text at 300 bytes a character, and two processes of up to
250 MB. Also 64 MB of bodies, and six times that as objects."""


def run(quick: bool = False, seconds: float = 60.0) -> Report:
    """One server: idle, under all attacks at once, quiet again, and stopped."""
    report = Report("siege", f"ten attacks at once for {seconds:g} s, demo models", ("what", "value", "goal", "remark"))
    with server(SETTINGS) as process, Display() as display:
        asyncio.run(_measure(process, report, display, quick, 2.0 if quick else seconds))
        _add_end(report, process)
    return report


async def _measure(process: Served, report: Report, display: Display, quick: bool, seconds: float) -> None:
    rest, often = (1.0, 1) if quick else (REST_S, 4)
    body = JOB | FEWER if quick else JOB
    async with _client(process, VICTIM) as client, _client(process, WORKER) as worker:
        await _texts_of(client, 5 * often)
        display.begin("idle", 1)
        expected = await _finished(worker, body)
        await _everything_once(worker, body)
        idle = await _texts_of(client, 15 * often)
        before = memory_of(process.pid)
        display.begin("siege", seconds)
        watch = _Watch(process, client, display)
        async with _attacking(process.url, seconds + min(seconds, 5.0)) as attackers:
            job = asyncio.create_task(_finished(worker, body))
            await watch.through(seconds)
            statuses = json.loads((await attackers.communicate())[0])
        found = await job
        await asyncio.sleep(rest)
        after = memory_of(process.pid)
        quiet = await _texts_of(client, 8 * often)
    _add_victim(report, watch, idle, quiet)
    same = _numbers(found) == _numbers(expected)
    report.add("a job that ran meanwhile, against the same job alone", "equal" if same else "DIFFERENT", "equal", "")
    bound = before + ALLOWED_MB * 1e6
    report.add("most resident memory, children included", f"{watch.most / 1e6:.0f} MB", f"{bound / 1e6:.0f} MB", "")
    report.add(f"memory {rest:g} s after / before", f"{after / before:.2f}", "1.2", f"{before / 1e6:.0f} MB before")
    wrong = sum(n for status, n in statuses.items() if status >= "500" and status not in ("503", "504"))
    told = ", ".join(f"{status}: {statuses[status]}" for status in sorted(statuses))
    report.add("5xx other than 503 and 504", wrong, "0", f"{told} (0: the client gave up, or was cut)")


def _client(process: Served, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=process.url, headers={"Authorization": f"Bearer {key}"}, timeout=120)


async def _everything_once(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """The first picture, page and long text load libraries for good: memory is compared after that."""
    job = await finished(client, body)
    for form in ("results.csv", "report.html", "plot.png"):
        (await client.get(job["links"][form])).raise_for_status()
    (await client.get("/methods/yarn/frequencies.png", params={"factor": 2})).raise_for_status()
    (await client.post("/tokenize", json={"prompt": "one two " * 250_000})).raise_for_status()


@asynccontextmanager
async def _attacking(url: str, seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """All attacks, in another process that prints the answers. It yields to the server: attackers do not
    sit on the server's processors."""
    yielding = ["nice", "-n", "10"] if shutil.which("nice") else []
    command = [*yielding, sys.executable, "-m", "benchmarks.servers.siege_attacks", url, str(seconds)]
    names = [attack.__name__ for attack in ATTACKS]
    running = await asyncio.create_subprocess_exec(*command, *names, stdout=asyncio.subprocess.PIPE)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()


class _Watch:
    """The tenant that must not notice: probes, short generations, and the server's memory meanwhile."""

    def __init__(self, process: Served, client: httpx.AsyncClient, display: Display) -> None:
        self._process, self._client, self._display = process, client, display
        self.probes: list[float] = []
        self.texts: list[float] = []
        self.wrong = 0
        self.most = 0

    async def through(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(self._probe(until), self._generate(until), self._memory(until))

    async def _probe(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self._process.url, timeout=60) as client:
            while time.monotonic() < until:
                began = time.perf_counter()
                self.wrong += (await client.get("/health/live")).status_code != 200
                self.probes.append(time.perf_counter() - began)
                await asyncio.sleep(0.02)

    async def _generate(self, until: float) -> None:
        while time.monotonic() < until:
            self.texts += await _texts_of(self._client, 1)

    async def _memory(self, until: float) -> None:
        began = time.monotonic()
        while time.monotonic() < until:
            self.most = max(self.most, await asyncio.to_thread(memory_of, self._process.pid))
            self._display.at(time.monotonic() - began, f"{self.most / 1e6:.0f} MB, {len(self.texts)} texts")
            await asyncio.sleep(1)


async def _texts_of(client: httpx.AsyncClient, count: int) -> list[float]:
    """Seconds of so many short generations, one after another."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        answer = await client.post("/generate", json=SHORT)
        answer.raise_for_status()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    return found


async def _finished(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The result of a job."""
    job = await finished(client, body)
    result: dict[str, Any] = (await client.get(job["links"]["results.json"])).raise_for_status().json()
    return result


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("id", "seconds", "links")}


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its children, pages that they share counted once."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended meanwhile
            continue
    return total


def _add_victim(report: Report, watch: _Watch, idle: list[float], quiet: list[float]) -> None:
    report.add(
        "/health/live, p50 / p95 / p99", f"{percentiles(watch.probes, 1e3)} ms", "p99 250 ms", f"{len(watch.probes)}"
    )
    report.add("probes not answered with 200", watch.wrong, "0", f"slowest {max(watch.probes):.2f} s")
    middle, slowed = statistics.median(idle), statistics.median(watch.texts)
    remark = f"{len(watch.texts)} of 8 tokens; {percentiles(watch.texts, 1e3)} ms; idle {percentiles(idle, 1e3)} ms"
    report.add("short generation of another tenant / idle median", f"{slowed / middle:.1f}", "under 10", remark)
    report.add("the same afterwards", f"{statistics.median(quiet) / middle:.2f}", "", "")


def _add_end(report: Report, process: Served) -> None:
    """SIGTERM, with what the attackers left behind."""
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    psutil.Process(process.pid).wait(60)
    report.add("seconds from SIGTERM to the end", f"{time.monotonic() - began:.1f}", f"{GRACE_S + 5:g}", "")
