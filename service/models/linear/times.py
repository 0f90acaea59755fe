"""Times of computations on this machine.

Libraries choose kernels by the maker and the instructions of a processor, so each machine has its fastest ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

ROUNDS = 30
"""Runs of each computation in turn. The fastest run counts, since other work only slows a run down."""
LEAST = 3
LIMIT_S = 0.1
"""Seconds after which no other round begins, behind the ``LEAST``. Short computations have more rounds."""
ALIKE = 1.05
"""Nothing disturbs a computation whose second least time is less than this times the least."""
LONGEST_S = 0.5
"""Seconds in which other processes may disturb each run. Then the least times count as they are."""
GAIN = 0.9
"""A computation replaces one before it if it takes less than this part of its time, so noise decides little."""


def first_of_fast(times: Sequence[float]) -> int:
    """The index of the least of ``times``; an earlier one if they are like."""
    best = 0
    for index, taken in enumerate(times):
        if taken < GAIN * times[best]:
            best = index
    return best


def least_times(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each run at its fastest. The first run of each, which compiles, is not timed."""
    least = [(float("inf"), float("inf"))] * len(runs)
    for run in runs:
        run()
    start = time.perf_counter()
    done = 0
    while not _is_enough(done, time.perf_counter() - start, least):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            first, second, _ = sorted((*least[index], time.perf_counter() - began))
            least[index] = first, second
        done += 1
    return [taken for taken, _ in least]


def _is_enough(done: int, seconds: float, least: Sequence[tuple[float, float]]) -> bool:
    """True after ``done`` rounds in so many ``seconds`` with these two ``least`` times of each computation."""
    if done < LEAST or (done < ROUNDS and seconds <= LIMIT_S):
        return False
    return seconds > LONGEST_S or all(second < ALIKE * first for first, second in least)
