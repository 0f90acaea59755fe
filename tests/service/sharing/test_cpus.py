"""Threads on a CPU: as many as a container may run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.sharing import cpus


@pytest.fixture(name="cgroups")
def _cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "threads"), [("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 16)]
)
def test_a_container_runs_as_many_as_its_limit_allows(limit: str, threads: int, cgroups: Path) -> None:
    (cgroups / "cpu.max").write_text(f"{limit}\n")
    assert cpus.threads(None, 16) == threads
    assert cpus.threads(5, 16) == 5, "the setting decides"


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("-1", 16), ("broken", 16)])
def test_so_does_one_of_the_first_control_groups(quota: str, threads: int, cgroups: Path) -> None:
    (cgroups / "cpu").mkdir()
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpus.threads(None, 16) == threads


def test_without_a_limit_there_are_as_many_as_usual(cgroups: Path) -> None:
    assert cpus.threads(None, 16) == 16


@pytest.fixture(name="cores")
def _cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets the seconds of all processes and of this one, ``LOOK_S`` later. There are four cores."""
    clock = {"now": 0.0, "every": 0.0, "own": 0.0}

    def passed(every: float, own: float) -> None:
        clock.update(now=clock["now"] + cpus.LOOK_S, every=clock["every"] + every, own=clock["own"] + own)

    monkeypatch.setattr(cpus.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(cpus.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(cpus.Neighbours, "_seconds", lambda _: (clock["every"], clock["own"]))
    monkeypatch.setattr(cpus.Neighbours, "warned", None)
    return passed


@pytest.mark.parametrize(
    ("threads", "others", "warns"), [(4, 1.0, True), (4, 0.4, False), (3, 1.0, False), (1, 4.0, False)]
)
def test_other_processes_on_the_cores_are_named(
    threads: int, others: float, warns: bool, cores: Callable[[float, float], None]
) -> None:
    neighbours = cpus.Neighbours(threads)
    with capture_logs() as lines:
        for _ in range(3):
            cores((threads + others) * cpus.LOOK_S, threads * cpus.LOOK_S)
            neighbours.look()
    assert [line["event"] for line in lines] == ["cores_are_shared"] * warns
    assert all(line["busy_with_others"] == others for line in lines)


def test_seconds_of_this_process_are_among_those_of_all() -> None:
    before = cpus.Neighbours(2)._seconds()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    every, own = cpus.Neighbours(2)._seconds()
    assert own - before[1] > 0.15
    assert own - before[1] - 0.1 < every - before[0]
