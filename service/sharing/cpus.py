"""Threads on a CPU: as many as a container may run, and the processes beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import structlog

CGROUPS = Path("/sys/fs/cgroup")
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Microseconds of CPU in a period, and the period: in the second version of control groups, and in the first."""
NO_QUOTA = {"max", "-1"}

LOOK_S = 5.0
"""Seconds over which the use of the cores is measured."""
SILENCE_S = 600.0
"""Least seconds between two warnings."""
SPARE = 0.5
"""Cores that others may take too much: the client of a test is such a process."""

log = structlog.get_logger()


def threads(wanted: int | None, usual: int) -> int:
    """``wanted``, else the ``usual`` number or as many as the container may run at once."""
    return wanted if wanted is not None else max(1, min([usual, *_allowed()]))


def _allowed() -> Iterator[int]:
    """CPUs that the quota of a container is worth. A thread without a share of it stops all others in its step."""
    for files in QUOTAS:
        try:
            quota, period = " ".join((CGROUPS / file).read_text() for file in files).split()
            if quota not in NO_QUOTA:
                yield int(quota) // int(period)
        except (OSError, ValueError):  # no such limits there
            continue


class Neighbours:
    """Warns of other processes on the cores of ``threads`` threads, at most once in ``SILENCE_S``.

    libgomp's threads spin while they wait for each other. If one has no core, the others spin in vain. On two cores, a
    busy process made a stream 10 times slower on two threads, and not on one.
    """

    warned: float | None = None

    def __init__(self, threads: int) -> None:
        self._threads, self._process = threads, psutil.Process()
        self._since, self._used = time.monotonic(), self._seconds()

    def look(self) -> None:
        """Look at the cores, once in ``LOOK_S``."""
        now = time.monotonic()
        if self._threads == 1 or now - self._since < LOOK_S:
            return
        used, cores = self._seconds(), psutil.cpu_count() or 1
        others = (used[0] - self._used[0] - used[1] + self._used[1]) / (now - self._since)
        self._since, self._used = now, used
        is_silent = Neighbours.warned is not None and now - Neighbours.warned < SILENCE_S
        if others + self._threads > cores + SPARE and not is_silent:
            Neighbours.warned = now
            log.warning(
                "cores_are_shared",
                cores=cores,
                threads=self._threads,
                busy_with_others=round(others, 1),
                hint="threads without a core slow down all others: set ROPEWAY_THREADS to the cores that are left",
            )

    def _seconds(self) -> tuple[float, float]:
        """Seconds of CPU that all processes have used, and this one."""
        every, own = psutil.cpu_times(), self._process.cpu_times()
        return sum(every) - every.idle - getattr(every, "iowait", 0.0), own.user + own.system
