"""Decode steps of runs that take turns, timed by the arrival of their tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.gpu.scale import Scale

Arrivals = list[list[float]]
"""Seconds of ``time.perf_counter`` at which the new tokens of each request arrived."""

Run = Callable[[int], Arrivals]
"""Answers all requests of a run with so many new tokens each."""


class Seconds(NamedTuple):
    """Until every request has its first token, and of a step from then until the first one ends."""

    prefill: float
    step: float


def timed(run: Run, new_tokens: int) -> Seconds:
    """One run.

    Raises:
        ValueError: if the requests are never decoded all at once.
    """
    began = time.perf_counter()
    arrivals = run(new_tokens)
    last = max(arrivals, key=lambda times: times[0])
    together = [each for each in last if each <= min(times[-1] for times in arrivals)]
    if len(together) < 2:
        raise ValueError("some request ends before another one begins")
    return Seconds(last[0] - began, (together[-1] - together[0]) / (len(together) - 1))


def time_steps(
    runs: Mapping[str, Run], scale: Scale, limit_s: float, few: int
) -> tuple[dict[str, Seconds], dict[str, str]]:
    """Medians of each run, and errors of those that cannot run. A step all at once comes after ``few`` tokens.

    Each has one round before the others, which compiles and captures. A run whose first round takes a third of
    ``limit_s`` compiles nothing, so that round is its only one.
    """
    rounds: dict[str, list[Seconds]] = {}
    failures = {}
    slow = set()
    for what, run in runs.items():
        began = time.perf_counter()
        try:
            rounds[what] = [timed(run, few + scale.steps)]
        except Exception as error:
            failures[what] = f"{type(error).__name__}: {str(error)[:100]}"
        if time.perf_counter() - began > limit_s / 3:
            slow.add(what)
    repeated = [what for what in rounds if what not in slow]
    began = time.perf_counter()
    for number in range(scale.rounds):
        shift = number % max(len(repeated), 1)
        for what in repeated[shift:] + repeated[:shift]:
            rounds[what].append(timed(runs[what], few + scale.steps))
        if time.perf_counter() - began > limit_s:
            break
    measured = {what: every if what in slow else every[1:] for what, every in rounds.items()}
    return {
        what: Seconds(*map(statistics.median, zip(*each, strict=True))) for what, each in measured.items()
    }, failures
