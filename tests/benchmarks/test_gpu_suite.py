"""The GPU suite runs every part on the CPU, so that it works the day a card is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks import gpu_suite
from benchmarks.gpu.scale import SMOKE
from tests.forks.process import forked
from tests.forks.python import start_forks


def smoke(out: Path) -> None:
    start_forks()
    gpu_suite.main(True, out)


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    log = tmp_path / "log"
    assert forked(smoke, out, log=log).wait() == 0, log.read_text()
    results = json.loads(out.read_text())["results"]
    assert {row["part"] for row in results} == {part.__name__ for part, _ in gpu_suite.PARTS}
    for part in {row["part"] for row in results}:
        assert len([row for row in results if row["part"] == part]) > 1, f"{part} measured nothing"
    shares = [row["value"] for row in results if "outside the model" in row["what"]]
    assert len(shares) == 2
    assert all(0 < share < 100 for share in shares)
    assert sum("continuous batching" in row["what"] for row in results) == 4
    assert sum("equal to the bit" in row["remark"] for row in results) == 3


def test_a_failing_part_loses_only_its_own_rows(tmp_path: Path) -> None:
    results: list[dict[str, object]] = []

    def broken():
        yield "first", 1.0, "s", ""
        raise RuntimeError("out of memory")

    gpu_suite.run_part("broken", broken, SMOKE, results, tmp_path / "rows.json")
    gpu_suite.run_part("late", broken, SMOKE, results, tmp_path / "rows.json", skipped="no time left")
    gpu_suite.run_part(
        "whole", lambda: iter([("second", float("nan"), "s", "")]), SMOKE, results, tmp_path / "rows.json"
    )
    assert [(row["what"], row["failed"]) for row in results] == [
        ("first", False),
        ("failed", True),
        ("whole part", False),
        ("not run", False),
        ("second", False),
        ("whole part", False),
    ]
    assert "out of memory" in str(results[1]["remark"])
    assert results[4]["value"] is None, "JSON has no NaN"
    assert json.loads((tmp_path / "rows.json").read_text())["results"] == results


def test_without_a_card_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite.torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="--smoke"):
        gpu_suite.main(out=tmp_path / "none.json")


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="--only: decoding; there are tests, roofline, decode_8b"):
        gpu_suite.main(True, tmp_path / "none.json", only=["decoding"])
