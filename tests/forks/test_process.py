"""Forked processes end, fail and are killed as others do."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from service.sharing.child import Child
from tests.forks.process import forked


def report(name: str) -> int:
    print(os.environ[name], Path.cwd(), "torch" in sys.modules, sys.stdin.read() == "")
    print("to the same file", file=sys.stderr)
    return 7


def test_output_environment_folder_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", "given")
    process = forked(report, "OF_THE_TEST", log=tmp_path / "log", folder=tmp_path)
    assert process.wait(60) == process.poll() == 7
    assert set((tmp_path / "log").read_text().splitlines()) == {f"given {tmp_path} True True", "to the same file"}


def loaded() -> bool:
    return "schemathesis" in sys.modules


def report_of_a_child() -> None:
    print("schemathesis" in sys.modules, Child(loaded).run())


def test_children_that_draw_are_forks_of_the_half_with_all_libraries(tmp_path: Path) -> None:
    assert forked(report_of_a_child, log=tmp_path / "log").wait(60) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == "False True\n"


def test_an_exception_is_in_the_log(tmp_path: Path) -> None:
    assert forked(report, "NOT_SET", log=tmp_path / "log").wait(60) == 1
    assert "KeyError: 'NOT_SET'" in (tmp_path / "log").read_text()


def test_a_process_that_runs_is_waited_for_and_killed(tmp_path: Path) -> None:
    process = forked(time.sleep, 60, log=tmp_path / "log")
    assert process.poll() is None
    with pytest.raises(TimeoutError):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    process.terminate()  # does nothing
    assert not psutil.pid_exists(process.pid)
