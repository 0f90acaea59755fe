"""The fastest of several computations on this machine.

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
GAIN = 0.9
"""A computation replaces one before it if it takes less than this part of its time, so noise decides little."""


def fastest(runs: Sequence[Callable[[], object]]) -> int:
    """The index of the one that takes the least time; an earlier one if times are like.

    The first run of each, which compiles, is not timed.
    """
    times = [float("inf")] * len(runs)
    for run in runs:
        run()
    start = time.perf_counter()
    for done in range(ROUNDS):
        if done >= LEAST and time.perf_counter() - start > LIMIT_S:
            break
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            times[index] = min(times[index], time.perf_counter() - began)
    best = 0
    for index, taken in enumerate(times):
        if taken < GAIN * times[best]:
            best = index
    return best
