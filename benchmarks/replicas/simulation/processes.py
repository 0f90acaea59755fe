"""CPU time of the threads of a process, and the time that they wait for a processor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

Threads = Mapping[int, tuple[float, float]]
"""Thread -> (seconds on a processor, seconds in the queue for one), by Linux' scheduler."""


def threads(pid: int) -> Threads:
    """All threads of a process so far."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            ran, waited, _ = (task / "schedstat").read_text().split()
            found[int(task.name)] = int(ran) / 1e9, int(waited) / 1e9
    return found


def cpu_s(pid: int) -> float:
    """Seconds that the threads of a process have been on a processor."""
    return sum(ran for ran, _ in threads(pid).values())


def busiest(before: Threads, after: Threads) -> int:
    """The thread with the most CPU time between two looks."""
    return max(after, key=lambda thread: after[thread][0] - before.get(thread, (0.0, 0.0))[0])


def slowdown(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Wall time over CPU time of one thread, without the time that it sleeps."""
    return 1 + (after[1] - before[1]) / (after[0] - before[0])
