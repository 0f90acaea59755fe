"""Scores against the one parameter in which encodings differ: the pictures ``by-<parameter>``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from patches import RopeGeometry, describe, parse
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult
from service.figures import Picture, pictures_of
from service.figures.results import picture_of
from service.reports.html import report_of
from tests.service.figures import examples
from tests.service.figures.measured import LENGTHS
from tests.service.results import result_of

GEOMETRY = RopeGeometry(32, 32, 1e4, 256, 256, 4)
NTK = ["ntk(factor=8)", "ntk(factor=2)", "ntk(factor=4)"]
BETA_FAST = ["yarn(beta_fast=8, factor=4)", "yarn(beta_fast=16, factor=4)", "yarn(factor=4)"]
"""The last one has the default, 32, which its label leaves out."""
NESTED = [f"self_extend(base=({base}))" for base in ("yarn:beta_fast=8,factor=4", "yarn:beta_fast=64,factor=4")]


def perplexity(labels: Sequence[str], models: Mapping[str, str] | None = None) -> PerplexityResult:
    """The perplexity of encoding n at the length of index k is 5 + n + k / 10."""
    curves = {label: [5 + n + k / 10 for k in range(len(LENGTHS))] for n, label in enumerate(labels)}
    result = result_of(curves, LENGTHS, models=models)
    for method in result.methods:
        method.pe = {"method": method.label}
        if method.label != "auto":
            method.pe = describe(parse(method.label), GEOMETRY, LENGTHS[-1])
    return result


def by_parameter(result: EvaluationResult) -> list[Picture]:
    return [picture for picture in pictures_of(result) if re.match(r"(\d+-)?by-", picture.name)]


def lines(picture: Picture) -> dict[str, list[tuple[float, float]]]:
    """The points as hovering shows them: whiskers lie aside from each other."""
    shown = [trace for trace in picture.figure.data if trace.showlegend is not False]
    return {trace.name: list(zip(map(float, xs_of(trace)), trace.y, strict=True)) for trace in shown}


def xs_of(trace: Any) -> list[str]:
    template = trace.hovertemplate
    if isinstance(template, str):
        return [str(x) for x in trace.x]
    return [text.partition(":")[0].replace(",", "") for text in template]


def test_a_line_per_length_has_the_scores_by_value() -> None:
    (picture,) = by_parameter(perplexity(["default", *NTK, "linear(factor=2)"]))
    assert picture.name == "by-factor"
    assert lines(picture) == {
        f"{length:,} tokens": [(2, 7 + k / 10), (4, 8 + k / 10), (8, 6 + k / 10)] for k, length in enumerate(LENGTHS)
    }
    assert picture.figure.layout.xaxis.type == "log", "factors double"
    assert picture.title == "Perplexity by factor: tiny"
    assert picture.subtitle == "ntk, all other parameters equal"


def test_intervals_are_drawn_and_in_the_table() -> None:
    result = perplexity(NTK)
    (picture,) = by_parameter(result)
    row = next(row for row in picture.rows if row["parameter_value"] == 2 and row["length"] == 512)
    at = result.methods[1].lengths[1]
    assert at.interval is not None
    assert (row["method"], row["value"]) == ("ntk(factor=2)", at.perplexity)
    assert (row["interval_low"], row["interval_high"]) == (at.interval.low, at.interval.high)
    assert len(picture.rows) == 3 * len(LENGTHS)
    bars = [trace.error_y for trace in picture.figure.data if trace.showlegend is not False]
    assert any(bar.array for bar in bars) or any(trace.fill == "toself" for trace in picture.figure.data)


def test_a_default_that_the_label_leaves_out_has_its_place() -> None:
    (picture,) = by_parameter(perplexity(BETA_FAST))
    assert picture.name == "by-beta_fast"
    assert lines(picture)["256 tokens"] == [(8, 5), (16, 6), (32, 7)]
    assert picture.subtitle == "yarn:4, all other parameters equal"


def test_a_wide_range_makes_the_axis_logarithmic() -> None:
    (picture,) = by_parameter(perplexity([f"ntk(factor={factor})" for factor in (2, 8, 20)]))
    axis = picture.figure.layout.xaxis
    assert axis.type == "log"
    assert list(axis.tickvals) == [2, 8, 20]
    low, high = axis.range
    assert low < math.log10(2) < math.log10(20) < high


def test_parameters_of_an_encoding_underneath() -> None:
    (picture,) = by_parameter(perplexity([*NESTED, "self_extend(base=yarn:4)"]))
    assert picture.name == "by-base.beta_fast"
    assert lines(picture)["256 tokens"] == [(8, 5), (32, 7), (64, 6)]
    groups = [f"self_extend(base=yarn:4, group_size={size})" for size in (2, 4)]
    (picture,) = by_parameter(perplexity([*groups, "self_extend(base=yarn:4)"]))
    assert [x for x, _ in lines(picture)["256 tokens"]] == [2, 4, 8]
    assert (picture.name, picture.subtitle) == ("by-group_size", "self_extend:base=yarn:4, all other parameters equal")


@pytest.mark.parametrize(
    ("labels", "models"),
    [
        (NTK[:2], None),
        ([*NTK[:2], "linear(factor=4)"], None),
        (["yarn(factor=2)", "yarn(factor=4)", "yarn(beta_fast=16, factor=8)"], None),
        (["self_extend(base=yarn:2)", "self_extend(base=yarn:4)", "self_extend(base=linear:8)"], None),
        (["self_extend(base=yarn:2)", "self_extend(base=yarn:4)", "self_extend"], None),
        ([*NTK], {NTK[0]: "tuned"}),
        (["default", "alibi", "dynamic", "streaming", "none(attention_temperature=log_n)"], None),
    ],
)
def test_what_differs_in_more_has_no_picture(labels: list[str], models: dict[str, str] | None) -> None:
    assert by_parameter(perplexity(labels, models)) == []


def test_auto_is_none_of_them_whatever_it_chose() -> None:
    result = perplexity([*NTK[:2], "auto"])
    result.methods[2].pe = describe(parse("ntk:4"), GEOMETRY, LENGTHS[-1]) | {"requested": "auto"}
    assert by_parameter(result) == []


def test_models_have_their_own_pictures() -> None:
    labels = [*NTK, *(f"yarn(factor={factor})" for factor in (2, 4, 8))]
    first, second = by_parameter(perplexity(labels, dict.fromkeys(labels[3:], "tuned")))
    assert (first.name, second.name) == ("by-factor", "by-factor-2")
    assert second.subtitle == "yarn on tuned, all other parameters equal"
    assert lines(second)["256 tokens"] == [(2, 8), (4, 9), (8, 10)]


def test_a_factor_on_attention_is_the_parameter_and_not_the_number_in_effect() -> None:
    labels = [f"yarn(factor=4, attention_factor={value})" for value in (0.5, 1.5)]
    assert by_parameter(perplexity([*labels, "yarn(factor=4)"])) == [], "the default of the parameter is no number"
    (picture,) = by_parameter(perplexity([*labels, "yarn(factor=4)", "yarn(factor=4, attention_factor=1.25)"]))
    assert [x for x, _ in lines(picture)["256 tokens"]] == [0.5, 1.25, 1.5]


def test_a_grid_has_its_largest_families() -> None:
    grid = [f"yarn(beta_fast={fast}, factor={factor})" for fast in range(10, 20) for factor in (2, 4, 8)]
    names = [picture.name for picture in by_parameter(perplexity(grid))]
    assert names == [
        "by-beta_fast",
        "by-beta_fast-2",
        "by-beta_fast-3",
        *["by-factor"],
        *[f"by-factor-{n}" for n in range(2, 6)],
    ]


def test_other_evaluations_and_parts_of_a_sweep_have_it() -> None:
    passkey = examples.passkey(NTK)
    (picture,) = by_parameter(passkey)
    assert picture.name == "by-factor"
    scores = [method.lengths[-1].score for method in passkey.methods]
    assert lines(picture)["2,048 tokens"] == [(2, scores[1]), (4, scores[2]), (8, scores[0])]
    assert [picture.name for picture in by_parameter(examples.sweep(NTK))] == ["1-by-factor", "2-by-factor"]
    for evaluation in (examples.ruler, examples.long_perplexity, examples.probe):
        assert "by-factor" in [picture.name for picture in pictures_of(evaluation(NTK))]
    for evaluation in (examples.recommend, examples.search):
        assert by_parameter(evaluation(NTK)) == [], "these have no scores by length"


def test_it_is_named_like_the_others_and_in_reports() -> None:
    result = perplexity(NTK)
    assert picture_of(result, "by-factor").png().startswith(b"\x89PNG")
    assert "Perplexity by factor" in report_of(result)
