"""The processor, the threads that a container may run on it, and the processes beside them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import structlog

CGROUPS = Path("/sys/fs/cgroup")
"""The limits of a container: files of the second version of control groups, or folders of the first."""
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Microseconds of CPU in a period, and the period: in the second version of control groups, and in the first."""
NO_QUOTA = {"max", "-1"}

LOOK_S = 2.0
"""Seconds of work over which the use of the cores is measured."""
SILENCE_S = 600.0
"""Least seconds between two warnings."""
SPARE = 0.5
"""Cores that others may take too much: the client of a test is such a process."""

log = structlog.get_logger()


@cache
def processor() -> str:
    """The processor's name as Linux has it; elsewhere its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def threads(wanted: int | None, usual: int) -> int:
    """``wanted``, else the ``usual`` number or as many whole CPUs as the container may use at once."""
    return wanted if wanted is not None else max(1, min([usual, *_allowed()]))


def _allowed() -> Iterator[int]:
    """CPUs that the quota of a container is worth. A thread without a share of it stops all others in its step."""
    for files in QUOTAS:
        try:
            quota, period = " ".join((CGROUPS / file).read_text() for file in files).split()
            if quota not in NO_QUOTA:
                yield int(quota) // int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such limits there
            continue


class Neighbours:
    """Warns of other processes on the cores of ``threads`` threads, at most once in ``SILENCE_S``.

    libgomp's threads spin while they wait for each other. If one has no core, the others spin in vain. On two cores, a
    busy process made a stream more than 10 times slower on two threads, and not on one.
    """

    warned: float | None = None

    def __init__(self, threads: int) -> None:
        self._threads, self._process = threads, psutil.Process()
        self._worked = self._others = 0.0
        self._start()

    def begin(self) -> None:
        """The threads work from now on."""
        if self._threads > 1:
            self._start()

    def _start(self) -> None:
        self._since, self._used = time.monotonic(), self._seconds()

    def look(self) -> None:
        """The threads have worked since ``begin``, or since the last look."""
        if self._threads == 1:
            return
        since, before = self._since, self._used
        self._start()
        self._worked += self._since - since
        self._others += self._used[0] - before[0] - self._used[1] + before[1]
        if self._worked >= LOOK_S:
            self._judge(self._others / self._worked)
            self._worked = self._others = 0.0

    def _judge(self, others: float) -> None:
        cores, now = len(_cores()), self._since
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
        """Seconds that all processes have had of the cores of this one, and its own. Those of guests are in ``user``
        and ``nice``."""
        every, own = psutil.cpu_times(percpu=True), self._process.cpu_times()
        ours = [every[core] for core in _cores() if core < len(every)]
        used = sum(each.user + each.system + getattr(each, "nice", 0.0) for each in ours)
        return used, own.user + own.system


def _cores() -> list[int]:
    """The cores that this process may use, by number."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(psutil.cpu_count() or 1))
