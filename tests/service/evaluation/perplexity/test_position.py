"""Loss by position in bins of equal width: against plain numpy, over the same stored outcomes, and its picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from patches import problems_of
from service.cli.evaluations import own_fields, separated
from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.statistics.per_token import Scored, position_buckets
from service.figures.results import picture_of
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, registry, settings_of

PROBE = {"lengths": [64, 200], "distances": [16], "samples": 1, "segment_of": "document"}
SLIDING = {"lengths": [64, 200], "protocol": "sliding", "stride": 50}


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")


def planned(models: ModelRegistry, evaluation: str = "perplexity", **fields: Any) -> Any:
    request = EVALUATIONS[evaluation].request(**{"input": [TEXT[:900], TEXT[900:1700]], **fields})
    return plan_of(request, models, settings_of(Path("tiny")))


def test_bins_of_equal_width_count_every_token() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=299), rng.normal(size=5)
    buckets = position_buckets([Scored(0, first, 1, 1, 1), Scored(0, second, 0, 1, 1)], 100)
    assert [(b.start, b.stop, b.tokens) for b in buckets] == [(0, 100, 99 + 5), (100, 200, 100), (200, 300, 100)]
    expected = [np.concatenate([first[:99], second]).mean(), first[99:199].mean(), first[199:].mean()]
    assert [b.nll_mean for b in buckets] == pytest.approx(expected)
    assert [(b.start, b.stop) for b in position_buckets([Scored(0, first[:40], 250, 1, 1)], 7)] == [
        (start, start + 7) for start in range(245, 290, 7)
    ]
    assert position_buckets([], 7) == []


@pytest.mark.parametrize(
    ("evaluation", "fields"), [("perplexity", SLIDING), ("perplexity", {"lengths": [64, 200]}), ("probe", PROBE)]
)
def test_stored_outcomes_serve_any_bins(models: ModelRegistry, evaluation: str, fields: dict[str, Any]) -> None:
    """The numbers are means over the tokens of the longest length, by a loop over them."""
    doubling, linear = (planned(models, evaluation, **fields, **more) for more in ({}, {"position_bin": 48}))
    assert [unit.inputs() for unit in linear.units] == [unit.inputs() for unit in doubling.units]
    outcomes = [finish(unit.run()) for unit in doubling.units]
    by_bin: dict[int, list[float]] = defaultdict(list)
    for unit, outcome in zip(linear.units, outcomes, strict=True):
        if unit.kind == "windows" and unit.length == 200:
            nll = iter(outcome["nll"].tolist())
            for window in unit.windows:
                for token in range(window.first_scored, window.stop):
                    by_bin[(token - window.start + 1) // 48].append(next(nll))  # a BOS is before each window
    result = linear.result(outcomes)
    found = result.methods[0].nll_by_position
    assert [(b.start, b.stop, b.tokens) for b in found] == [
        (48 * at, 48 * at + 48, len(by_bin[at])) for at in sorted(by_bin)
    ]
    assert [b.nll_mean for b in found] == pytest.approx([np.mean(by_bin[at]) for at in sorted(by_bin)])
    assert [b.start for b in doubling.result(outcomes).methods[0].nll_by_position] == [0, 16, 32, 64, 128]
    assert (result.numbers()["position_bin"], "position_bin" in doubling.result(outcomes).numbers()) == (48, False)


def test_the_picture_has_a_linear_axis_and_the_middles_of_the_bins(models: ModelRegistry) -> None:
    plan = planned(models, lengths=[200], position_bin=48)
    result = plan.result([finish(unit.run()) for unit in plan.units])
    picture = picture_of(result, "nll-by-position")
    axis, line = picture.figure.layout.xaxis, picture.figure.data[-1]
    assert (axis.type, tuple(axis.range), list(axis.tickvals)) == (None, (0, 240), [0, 48, 96, 144, 192, 240])
    assert list(line.x) == [24, 72, 120, 168, 216]
    assert list(line.y) == [bucket.nll_mean for bucket in result.methods[0].nll_by_position]
    assert picture.subtitle.startswith("means over 48 positions")
    marks = [shape.x0 for shape in picture.figure.layout.shapes if shape.type == "line"]
    assert marks == [64], "the trained length"
    fine = planned(models, lengths=[200], position_bin=7)
    ticks = picture_of(fine.result([finish(unit.run()) for unit in fine.units]), "nll-by-position").figure.layout.xaxis
    assert list(ticks.tickvals) == [0, 25, 50, 75, 100, 125, 150, 175, 200]


def test_one_bin_is_refused_with_the_range(models: ModelRegistry) -> None:
    for evaluation in ("perplexity", "probe"):
        with pytest.raises(ValidationError) as raised:
            EVALUATIONS[evaluation].request(lengths=[64, 200], position_bin=200)
        (wrong,) = problems_of(raised.value.errors())
        assert wrong.field == "position_bin"
        assert wrong.message == "must be below the longest length (200), for two bins, not 200"
    for width in (0, -1, 1.5, "wide", 1 << 25):
        with pytest.raises(ValidationError, match="position_bin"):
            EVALUATIONS["perplexity"].request(position_bin=width)
    with pytest.raises(ValidationError, match="position_bin"):
        EVALUATIONS["long_perplexity"].request(position_bin=16)
    with pytest.raises(InvalidEvaluation, match=r"^position_bin: must be at least 2: 1600 tokens have at most 1024"):
        planned(models, input=TEXT, lengths=[64, 1600], position_bin=1)
    with pytest.raises(InvalidEvaluation, match=r"^position_bin: must be below the longest length \(\d+\), for two"):
        planned(models, input=TEXT, position_bin=1 << 20)
    assert planned(models, input=TEXT, lengths=[64, 1024], position_bin=1).position_bin == 1


def test_fewer_lengths_of_a_job_that_ended_early_keep_the_bins(models: ModelRegistry) -> None:
    request = EVALUATIONS["perplexity"].request(input=TEXT, lengths=[64, 200], position_bin=100)
    plan = plan_of(request.reduced({"lengths": [64]}), models, settings_of(Path("tiny")))
    assert (plan.lengths, plan.position_bin) == ([64], 100)


def test_the_shell_has_the_option() -> None:
    _, values = separated(["--position-bin", "256"], own_fields("perplexity"))
    assert values == {"position_bin": 256}
