"""Threads on a CPU: as many as a container may run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import CapturingLogger

from patches import parse, patched
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from service.machine import cpus
from tests.models import tiny_model


@pytest.fixture(name="cgroups")
def _cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpus, "CGROUPS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "threads"),
    [("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 16), ("5 0", 16)],
)
def test_a_container_runs_as_many_as_its_limit_allows(limit: str, threads: int, cgroups: Path) -> None:
    (cgroups / "cpu.max").write_text(f"{limit}\n")
    assert cpus.threads(None, 16) == threads
    assert cpus.threads(5, 16) == 5, "the setting decides"


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("190000", 1), ("-1", 16), ("broken", 16)])
def test_so_does_one_of_the_first_control_groups(quota: str, threads: int, cgroups: Path) -> None:
    (cgroups / "cpu").mkdir()
    (cgroups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cgroups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpus.threads(None, 16) == threads


def test_without_a_limit_there_are_as_many_as_usual(cgroups: Path) -> None:
    assert cpus.threads(None, 16) == 16


Passed = Callable[[float, float, float], None]


@pytest.fixture(name="passed")
def _passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    """Lets seconds pass in which all processes, and this one, have had seconds of four cores."""
    clock = {"now": 0.0, "every": 0.0, "own": 0.0}

    def passed(seconds: float, every: float, own: float) -> None:
        clock.update(now=clock["now"] + seconds, every=clock["every"] + every, own=clock["own"] + own)

    monkeypatch.setattr(cpus.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(cpus, "_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cpus.Neighbours, "_seconds", lambda _: (clock["every"], clock["own"]))
    monkeypatch.setattr(cpus.Neighbours, "warned", None)
    return passed


@pytest.mark.parametrize(
    ("threads", "others", "warns"), [(4, 1.0, True), (4, 0.4, False), (3, 1.0, False), (1, 4.0, False)]
)
def test_other_processes_on_the_cores_are_named(
    threads: int, others: float, warns: bool, passed: Passed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many short requests, between which others do as they like."""
    neighbours, log = cpus.Neighbours(threads), CapturingLogger()
    monkeypatch.setattr(cpus, "log", log)
    for _ in range(12):
        passed(60.0, 240.0, 0.0)
        neighbours.begin()
        passed(0.5, (threads + others) * 0.5, threads * 0.5)
        neighbours.look()
    assert [call.args for call in log.calls] == [("cores_are_shared",)] * warns
    assert all(call.kwargs["busy_with_others"] == others for call in log.calls)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes have all cores on this system")
def test_only_its_own_cores_count() -> None:
    """A thread that fills the one core that it has: its seconds are all that the core was used."""
    found: list[tuple[float, float]] = []

    def measured() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        neighbours = cpus.Neighbours(2)
        before, until = neighbours._seconds(), time.thread_time() + 0.5
        while time.thread_time() < until:
            pass
        found.append(tuple(after - then for after, then in zip(neighbours._seconds(), before, strict=True)))
        assert len(cpus._cores()) == 1

    thread = threading.Thread(target=measured)
    thread.start()
    thread.join()
    ((used, own),) = found
    assert own > 0.4
    assert used > 0.1, "a host that takes the core away for a time lets the thread's clock run"


async def test_a_generation_thread_looks_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(cpus.Neighbours, "look", lambda self: looks.append(self._threads))
    monkeypatch.setattr("service.engine.thread.generation_thread.WATCH_S", 0.001)
    with patched(tiny_model("llama")[1]) as patch:
        engine = Engine(patch, EngineLimits(512, 0), ())
        try:
            steps = engine.generate(
                [5, 9, 7], patch.resolve(parse({"method": "default"}), 90), SamplingParams(), 60, pe_method=""
            )
            async for _ in steps:
                pass
        finally:
            engine.thread.stop(1.0)
    assert set(looks) == {torch.get_num_threads()}
