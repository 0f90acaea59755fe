"""The timing function and the results file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.speed import curve_speed
from benchmarks.timing import Report, Timings, interleaved, write
from tests.conftest import ROOT


def test_runs_take_turns() -> None:
    calls: list[str] = []
    timings = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warmup=1)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(seconds) for name, seconds in timings.seconds.items()} == {"a": 3, "b": 3}


def test_a_limit_ends_after_a_whole_round() -> None:
    timings = interleaved({"a": lambda: None, "b": lambda: None}, rounds=50, limit_s=0.0)
    assert [len(seconds) for seconds in timings.seconds.values()] == [1, 1]


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The third round ran on a busy machine: both were slow, and the ratio does not show it.
    timings = Timings({"a": [2.0, 3.0, 90.0], "b": [1.0, 2.0, 50.0]})
    assert math.isclose(timings.ratio("a", "b"), 1.8)
    assert timings.median("a") == 3.0


def test_a_section_of_the_results_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nHow to read them.\n\n## first\n\nold\n\n## second\n\nkept\n", encoding="utf-8")
    report = Report("first", "title", ("what", "value"))
    report.add("a|b", 0.123456)
    write(report, path)
    once = path.read_text(encoding="utf-8")
    assert once.startswith("# Results\n\nHow to read them.\n\n## first\n\ntitle.")
    assert "| a\\|b | 0.1235 |" in once
    assert "old" not in once
    assert once.endswith("## second\n\nkept\n")
    write(report, path)
    assert path.read_text(encoding="utf-8") == once


def test_every_benchmark_is_listed_and_has_a_result() -> None:
    files = (ROOT / "benchmarks").glob("*/*.py")
    assert {path.stem for path in files if "\ndef run(quick" in path.read_text()} == set(command.MODULES)
    sections = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert {section.partition("\n")[0] for section in sections} >= set(command.MODULES)


def test_a_quick_run_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # other tests run beside this one
    report = curve_speed.run(quick=True)
    assert [row[0] for row in report.rows] == ["default"]
    assert float(report.rows[0][-1]) < 1e-6, "one pass gives the numbers of one per length"
