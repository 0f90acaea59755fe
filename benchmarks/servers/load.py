"""A server under load: every answer equals the same request alone, none is lost, memory and first tokens hold.

``python -m benchmarks load --clients 200 --seconds 180``. The server is another process, on the demo models. Its
queue is short on purpose, so that clients are refused and come back.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.paths import ROOT
from benchmarks.servers.load_clients import Tally, load
from benchmarks.servers.load_requests import Asked, Client, Drawing, ask_alone
from benchmarks.timing import Report
from service.evaluation.documents import language_reference

SETTINGS = {
    "model": "demo",
    "port": 0,
    "cache_tokens": 32768,
    "score_tokens": 32768,
    "max_queue": 64,
    "log_format": "json",
}
"""Room for some 70 requests at a time. Of 200 clients the queue holds fewer than the others."""

POOL = 60
SCORED = 16384
SHORT = 32
"""Prompt tokens of the requests whose first token is timed."""
SAMPLES = 60
SETTLE_S = 60.0
"""Memory may grow this long, or for a third of the time where that is shorter."""


def run(quick: bool = False, clients: int = 200, seconds: float = 180.0) -> Report:
    """One server: requests alone, all clients at once, then short requests beside a long scoring request."""
    report = Report(
        "load",
        f"{clients} clients at once for {seconds:g} s, mixed encodings, lengths, streams and scoring, demo models",
        ("what", "value", "goal", "remark"),
    )
    with server() as process, Display() as display:
        asyncio.run(_measure(process, report, display, clients, seconds, quick))
    return report


async def _measure(
    process: Served, report: Report, display: Display, clients: int, seconds: float, quick: bool
) -> None:
    async with Client(process.url) as client:
        text = language_reference()[:200_000]
        drawing = Drawing(text, await client.tokenize(text))
        size = 20 if quick else POOL
        display.begin("alone", size)
        pool = await ask_alone(client, drawing, size, display.at)
        tally, memory = Tally(), Memory(process.pid)
        display.begin(f"{clients} clients", seconds)
        watching = asyncio.create_task(_watch(tally, memory, display))
        try:
            await load(process.url, pool, clients, seconds, tally)
        finally:
            watching.cancel()
        memory.sample()
        tally.unequal.update(pool.unequal)
        _add_answers(report, tally, memory.samples[-1][0])
        _add_memory(report, memory, seconds)
        await _add_state(report, client, process)
        report.notes.append(
            f"{len(pool.requests)} different requests, asked one by one first; {pool.redrawn} more were left out: "
            "their two most likely tokens are so close somewhere that rounding decides"
        )
        report.notes.extend(tally.problems())
        await _add_first_tokens(report, client, drawing, display, 1024 if quick else SCORED, 10 if quick else SAMPLES)


# The server


@dataclass(frozen=True)
class Served:
    """A running server: its base URL, its process id, and the file that its log goes to."""

    url: str
    pid: int
    log: Path


@contextmanager
def server(settings: Mapping[str, Any] = SETTINGS, variables: Mapping[str, str] = {}) -> Iterator[Served]:
    """``ropeway serve`` on a free port, with nothing set but ``settings`` and environment ``variables``.

    Raises:
        RuntimeError: when it does not start; its log is the message.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROPEWAY_")}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        own = {"database_url": f"sqlite:///{folder}/jobs.db", **settings}
        flags = [flag for name, value in own.items() for flag in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "service.cli", "serve", *flags]
        environment |= {"PYTHONPATH": str(ROOT), **variables}
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            yield Served(_url_in(Path(log.name), running), running.pid, Path(log.name))
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def _url_in(log: Path, running: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < until:
        found = re.search(r"Uvicorn running on (http://127\.0\.0\.1:\d+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


@dataclass
class Memory:
    """Resident bytes of a process, with the seconds since the first sample."""

    pid: int
    samples: list[tuple[float, int]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def sample(self) -> int:
        rss: int = psutil.Process(self.pid).memory_info().rss
        self.samples.append((time.monotonic() - self.began, rss))
        return rss

    def between(self, start: float, stop: float) -> list[int]:
        return [rss for at, rss in self.samples if start <= at < stop]


# Progress


class Display:
    """A bar on stderr; lines where that is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[now]}"), console=console)
        self._task: Any = None
        self._printed = 0.0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: float) -> None:
        self._what = what
        self._task = self._progress.add_task(what, total=total, now="")

    def at(self, done: float, now: str = "") -> None:
        self._progress.update(self._task, completed=done, now=now)
        if not self._progress.console.is_terminal and time.monotonic() - self._printed > 10:
            self._printed = time.monotonic()
            self._progress.console.print(f"{self._what}: {done:.0f} {now}", markup=False, highlight=False)


async def _watch(tally: Tally, memory: Memory, display: Display) -> None:
    while True:
        rss = memory.sample()
        wrong = f"{tally.failures.total()} failed, {tally.unequal.total()} unequal"
        now = f"{len(tally.answers)} answers, {wrong}, {tally.refused} x 429, {rss / 1e6:.0f} MB"
        display.at(memory.samples[-1][0], now)
        await asyncio.sleep(0.5)


# The table


def percentiles(seconds: Sequence[float], unit: float = 1.0) -> str:
    """50th, 95th and 99th percentile, in seconds or by ``unit`` of them."""
    if len(seconds) < 2:
        return "too few"
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return " / ".join(f"{cuts[at - 1] * unit:.3g}" for at in (50, 95, 99))


def _add_answers(report: Report, tally: Tally, seconds: float) -> None:
    answers = len(tally.answers)
    routes = [f"{route} {len(tally.seconds(route))}" for route in ("generate", "completions", "perplexity")]
    report.add("answers", answers, "", f"in {seconds:.0f} s, the last ones waited for; {', '.join(routes)}")
    report.add("answers that differ from the same request alone", tally.unequal.total(), "0", "every token and count")
    report.add("5xx, broken connections and streams", tally.failures.total(), "0", "")
    report.add("requests neither answered nor refused", tally.lost, "0", "")
    report.add(
        "429, asked again after Retry-After", tally.refused, "", f"{tally.refused / max(answers, 1):.2f} per answer"
    )
    report.add("new tokens", f"{tally.new_tokens / seconds:.0f}/s", "", f"{len(tally.first_seconds())} streams")
    report.add(
        "time to first token, p50 / p95 / p99", f"{percentiles(tally.first_seconds())} s", "", "429s not counted"
    )
    for route in ("generate", "completions", "perplexity"):
        report.add(f"whole answer of {route}, p50 / p95 / p99", f"{percentiles(tally.seconds(route))} s", "", "")


def _add_memory(report: Report, memory: Memory, seconds: float) -> None:
    settled = min(SETTLE_S, seconds / 3)
    first, rest = memory.between(settled - 5, settled + 5), memory.between(settled, seconds)
    start, last = statistics.median(first), statistics.median(rest[-20:])
    highest = f"{settled:.0f} s: {start / 1e6:.0f} MB; end: {last / 1e6:.0f} MB; most since: {max(rest) / 1e6:.0f} MB"
    report.add(f"resident memory at the end / after {settled:.0f} s", f"{last / start:.3f}", "within 5 %", highest)
    report.add(f"most resident memory / after {settled:.0f} s", f"{max(rest) / start:.3f}", "within 5 %", "")


async def _add_state(report: Report, client: Client, process: Served) -> None:
    """The server's load afterwards."""
    states = (await client.load()).values()
    remaining = sum(state[name] for state in states for name in ("running", "waiting", "scoring", "slots_in_use"))
    restarts = sum(state["restarts"] for state in states)
    log = process.log.read_text(errors="replace").splitlines()
    errors = [line for line in log if '"level": "error"' in line or '"level": "critical"' in line]
    report.add("left running, waiting or holding a slot", remaining, "0", "as the server reports when all are answered")
    report.add("engine restarts and errors in the server's log", restarts + len(errors), "0", "")
    report.notes.extend(errors[:3])


# Short requests beside a long scoring request


async def _add_first_tokens(
    report: Report, client: Client, drawing: Drawing, display: Display, scored: int, samples: int
) -> None:
    """Time to the first token of short requests: idle, beside the scoring, idle again."""
    display.begin("first tokens", 3 * samples)
    shorts = _Shorts(client, drawing)
    long = Asked("perplexity", {"input": list(drawing.token_ids[:scored]), "lengths": [scored]}, stream=True)
    await shorts.times(5)  # the first ones after the load find nothing warm that they need
    idle = await shorts.times(samples, display)
    alone = await client.ask(long)
    beside, answers = await _beside(client, long, shorts, samples, display)
    idle += await shorts.times(samples, display)
    middle, slowed = statistics.median(idle), statistics.median(beside)
    report.add(
        "time to first token of short requests, idle", f"{percentiles(idle, 1e3)} ms", "", f"{len(idle)} requests"
    )
    remark = f"{len(beside)} requests; {percentiles(beside, 1e3)} ms"
    report.add(
        f"the same beside a scoring request of {scored} tokens / idle median",
        f"{slowed / middle:.2f}",
        "under 3",
        remark,
    )
    scoring = statistics.median(answer.whole_s for answer in answers)
    remark = f"{alone.whole_s:.1f} s alone, {scoring:.1f} s beside them"
    report.add("the scoring request beside short requests / alone", f"{scoring / alone.whole_s:.2f}", "", remark)
    different = sum(alone.difference(answer) is not None for answer in answers)
    report.add("scoring results that differ from the request alone", different, "0", f"{len(answers)} requests")


async def _beside(
    client: Client, long: Asked, shorts: _Shorts, samples: int, display: Display
) -> tuple[list[float], list[Any]]:
    """Seconds to the first token of requests that ran wholly beside ``long``, and the answers to that."""
    seconds: list[float] = []
    answers = []
    while len(seconds) < samples:
        running = asyncio.create_task(client.ask(long))
        while not running.done():
            taken = await shorts.times(1)
            if not running.done():
                seconds += taken
                shorts.shown(len(seconds), display)
        answers.append(await running)
    return seconds, answers


@dataclass
class _Shorts:
    """Streams of short prompts, each new to the server, one after another with a pause between them."""

    client: Client
    drawing: Drawing
    asked: int = 0

    async def times(self, count: int, display: Display | None = None) -> list[float]:
        found = []
        for number in range(count):
            start = 7 * self.asked % (len(self.drawing.token_ids) - SHORT)
            self.asked += 1
            body = {"prompt": list(self.drawing.token_ids[start : start + SHORT]), "max_new_tokens": 2}
            answer = await self.client.ask(Asked("generate", body, stream=True), f"short-{self.asked}")
            assert answer.first_s is not None
            found.append(answer.first_s)
            if display is not None:
                self.shown(number + 1, display)
            await asyncio.sleep(0.05)
        return found

    def shown(self, done: int, display: Display) -> None:
        display.at(done, f"{self.asked} short requests")
