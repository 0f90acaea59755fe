"""The answer of a search, from outcomes made by hand."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from service.evaluation.formatting import short_number
from service.evaluation.search.evolution import ONE, Individual
from service.evaluation.search.results import FOUND
from service.evaluation.search.unit import LateUnit
from service.models.registry import ModelRegistry
from service.policy.policy import Calibration, parse_policy
from tests.service.evaluation.search.made_up import LENGTH, answered, planned

TRIED = {"held_out": 8}


def loss_of(**by_name: float) -> Any:
    """Losses by the name of the method; a tenth of it varies with the window for the first named one."""
    wavers = next(iter(by_name))

    def loss(unit: LateUnit) -> float:
        name = unit.method.method
        return by_name.get(name, 3.0) + (0.1 * math.sin(7 * unit.stop) if name == wavers else 0.0)

    return loss


def test_a_search_that_wins_says_by_how_much(models: ModelRegistry) -> None:
    result, _ = answered(planned(models, **TRIED), loss_of(default=5.0, yarn=2.5, longrope=2.0))
    found, *others = result.methods
    assert result.answer.label == FOUND
    assert result.answer.surely_beats == [method.label for method in others]
    yarn = next(method.held_out for method in others if method.label == "yarn(factor=2)")
    assert yarn is not None
    assert found.held_out is not None
    assert yarn.times_search == pytest.approx(math.exp(0.5))
    assert yarn.perplexity == pytest.approx(found.held_out.perplexity * math.exp(0.5))
    assert found.held_out.times_search == 1
    words = " ".join(result.words())
    assert words.startswith("The factors of this search are best on 8 held-out windows of 128 tokens: perplexity ")
    assert "yarn(factor=2), the next, has 1.649 times (95 % interval 1.649 to 1.649) the perplexity." in words
    assert "the search surely beats default, linear(factor=2), ntk(factor=2) and yarn(factor=2)." in words
    assert "does not surely beat" not in words


def test_a_search_that_does_not_surely_win_says_so(models: ModelRegistry) -> None:
    result, _ = answered(planned(models, **TRIED), loss_of(yarn=2.001, longrope=2.0))
    yarn = result.methods[-1].held_out
    assert yarn is not None
    assert yarn.times_search_interval is not None
    assert yarn.times_search_interval.low < 1 < yarn.times_search_interval.high
    assert "yarn(factor=2)" not in result.answer.surely_beats
    assert "The search does not surely beat yarn(factor=2): the intervals have 1." in " ".join(result.words())


def test_the_best_on_held_out_windows_is_the_answer(models: ModelRegistry) -> None:
    result, _ = answered(planned(models, **TRIED), loss_of(default=5.0, yarn=1.5, longrope=2.0))
    assert result.answer.label == "yarn(factor=2)"
    assert result.answer.pe == {"method": "yarn", "factor": 2.0}
    assert result.pe["method"] == "longrope"
    words = " ".join(result.words())
    assert "yarn(factor=2) is best on 8 held-out windows of 128 tokens" in words
    assert "The search did not beat it. It has 0.607 times" in words
    assert "The search is surely worse than yarn(factor=2)." in words
    assert "does not surely beat" not in words
    assert [row[0] for row in result.overview().rows][:2] == ["yarn(factor=2)", FOUND]


def test_without_held_out_windows_nothing_is_sure(models: ModelRegistry) -> None:
    result, plan = answered(planned(models, stop_after=2))
    assert len(result.generations) == len(plan.bred) == 2
    assert all(method.held_out is None for method in result.methods)
    assert result.answer.surely_beats == []
    assert "No held-out window was read" in " ".join(result.words())
    assert result.scores().by_method == [{}] * len(result.methods)
    whole, _ = answered(planned(models))
    assert whole.generations[:2] == result.generations, "the windows and the candidates are the same"


def test_the_encoding_fits_into_a_policy(models: ModelRegistry) -> None:
    result, _ = answered(planned(models))
    policy = {
        **{"version": 1, "model": "tiny", "fingerprint": result.fingerprint, "trained_length": 64},
        "ranges": [{"up_to": 64, "pe": {"method": "default"}}, {"up_to": LENGTH, "pe": result.pe}],
        "calibration": Calibration(created=datetime.now(UTC), measured=result.words()),
    }
    assert parse_policy(policy).ranges[1].up_to == LENGTH


def test_the_numbers_are_means_over_windows(models: ModelRegistry) -> None:
    """``made_up`` adds a difficulty of the window to the loss of a method."""
    result, plan = answered(planned(models, held_out=8, methods=["self_extend:4"]), lambda unit: 2.0 + unit.stop % 2)
    stops = [[place.stop for place in places.windows] for places in (plan.places, plan.held_out)]
    search, held_out = (np.mean([2 + stop % 2 + (stop * 37 % 101) / 101 for stop in half]) for half in stops)
    perplexity = math.exp(held_out)
    rows = [(row["method"], row["measure"], row["index"], row["value"]) for row in result.rows()]
    expected: list[Any] = []
    for index in (1, 2, 3):
        expected += [(FOUND, f"{name}_loss", index, search) for name in ("best", "median")]
    for method in (FOUND, "default", "self_extend(group_size=4)"):
        expected += [(method, "search_loss", None, search), (method, "perplexity", None, perplexity)]
        expected.append((method, "times_search", None, 1.0))
        factors = next(one.factors for one in result.methods if one.label == method) or []
        expected += [(method, "factor", pair, factor) for pair, factor in enumerate(factors)]
    assert [row[:3] for row in rows] == [row[:3] for row in expected]
    assert [row[3] for row in rows] == pytest.approx([row[3] for row in expected])
    interval = result.methods[0].held_out.interval  # type: ignore[union-attr]
    assert interval is not None
    ends = f"{short_number(interval.low)} to {short_number(interval.high)}"
    shown = [short_number(perplexity), ends, "1.000", f"{search:.4f}"]
    assert [row[1:] for row in result.overview().rows] == [shown] * 3


@pytest.mark.parametrize(("stop_after", "words"), [(1, "1 generation"), (2, "2 generations"), (None, "3 generations")])
def test_the_course_of_the_search_is_said(models: ModelRegistry, stop_after: int | None, words: str) -> None:
    result, plan = answered(planned(models, stop_after=stop_after))
    best = [min(map(by_factors, generation)) for generation in plan.bred]
    stops = [place.stop for place in plan.places.windows]
    window = np.mean([(stop * 37 % 101) / 101 for stop in stops])
    ends = f"from {best[0] + window:.4f} to {min(best) + window:.4f}"
    candidates = sum(len(generation) for generation in plan.bred)
    own = "took the loss on the search's own windows"
    assert f"{candidates} candidates in {words} {own} {ends}." in result.answer.words
    if stop_after is not None:
        losses = [one.search_loss for one in result.ranked()]
        assert losses == sorted(losses)
        assert [row[1:] for row in result.overview().rows] == [["-", "-", "-", f"{loss:.4f}"] for loss in losses]


def by_factors(individual: Individual) -> float:
    """``by_distance`` of ``made_up``."""
    return 2.0 + sum(abs(math.log(factor / ONE / 3)) for factor in individual.factors)


def test_a_table_has_every_number(models: ModelRegistry) -> None:
    result, plan = answered(planned(models))
    rows = result.rows()
    counts = {measure: sum(row["measure"] == measure for row in rows) for measure in {row["measure"] for row in rows}}
    pairs, methods = plan.space.pairs, len(result.methods)
    assert counts == {
        **dict.fromkeys(("best_loss", "median_loss"), 3),
        **dict.fromkeys(("search_loss", "perplexity", "times_search"), methods),
        "factor": pairs * methods,
    }
