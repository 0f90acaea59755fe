"""Pictures and tables of a comparison: its numbers, changes against partners, and axes that have room for them."""

from __future__ import annotations

from typing import Any

import pytest

from service.evaluation.comparison.results import ComparisonResult
from service.evaluation.scores import Interval
from service.figures.evaluations.comparison import change_picture, comparison_pictures, numbers_picture
from service.figures.picture import Picture
from service.reports.numbers import Cell, summaries
from tests.service.evaluation.comparing import AFTER, BEFORE, OTHER, change_of, compared, passkey, perplexity


def of_perplexity() -> ComparisonResult:
    return compared(
        [perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER, "alibi": OTHER})], "default"
    )


def of_shares() -> ComparisonResult:
    return compared([passkey("a", [0.0] * 16), passkey("b", [1.0] * 8 + [0.0] * 8)])


def drawn(picture: Picture) -> dict[str, tuple[float, float, float]]:
    """Low end, value and high end of the only point of each line."""
    found: dict[str, tuple[float, float, float]] = {}
    for trace in picture.figure.data:
        ((y,), (above,), (below,)) = (trace.y, trace.error_y.array, trace.error_y.arrayminus)
        found[trace.name.partition(":")[0]] = y - below, y, y + above
    return found


def level(picture: Picture) -> list[float]:
    """Heights of level lines."""
    return [shape.y0 for shape in picture.figure.layout.shapes if shape.type == "line" and shape.y0 == shape.y1]


def axis(picture: Picture) -> Any:
    return picture.figure.layout.yaxis


def hovers(picture: Picture) -> list[str]:
    return [text for trace in picture.figure.data for text in trace.customdata or ()]


@pytest.mark.parametrize(
    ("result", "hover"),
    [(of_perplexity(), "95 % interval 22.08 to 26.99"), (of_shares(), "95 % interval 0 % to 19.4 %")],
    ids=["perplexity", "shares"],
)
def test_every_number_is_drawn_with_its_interval(result: ComparisonResult, hover: str) -> None:
    (numbers, _), methods = comparison_pictures(result), result.methods
    ends = {method.name: method.lengths[0].interval for method in methods}
    assert drawn(numbers) == {
        method.name: pytest.approx((at.low, method.lengths[0].value, at.high))
        for method in methods
        if (at := ends[method.name])
    }
    assert ends.keys() == drawn(numbers).keys()
    assert hovers(numbers)[0] == hover
    assert [row["value"] for row in numbers.rows] == [method.lengths[0].value for method in methods]
    assert numbers.caption.startswith("Lower is better." if result.lower_is_better else "Higher is better.")


@pytest.mark.parametrize(
    ("result", "times", "equal", "title"),
    [(of_perplexity(), 1, 1, "ratio of perplexities"), (of_shares(), 100, 0, "difference of shares, points")],
    ids=["ratios", "points"],
)
def test_changes_are_drawn_beside_the_line_of_no_change(
    result: ComparisonResult, times: int, equal: float, title: str
) -> None:
    picture = change_picture(result)
    expected = {
        method.name: pytest.approx((times * of.interval.low, times * of.value, times * of.interval.high))
        for method in result.methods
        if (of := method.lengths[0].change) and of.interval
    }
    assert len(expected) == len(result.methods) - 1
    assert drawn(picture) == expected
    assert (level(picture), axis(picture).title.text) == ([equal], title)
    side = "Below" if result.lower_is_better else "Above"
    assert picture.caption.startswith(f"{side} the line at {equal} is better than default (a).")


@pytest.mark.parametrize(
    ("value", "ends", "axis_of"),
    [
        (0.9, (0.89, 0.91), (0.89, 1.005)),
        (0.9, (0.01, 7.0), (0.8475, 1.0575)),
        (1.001, (1.0, 1.002), (0.995, 1.005)),
        (1.4, None, (0.995, 1.4)),
    ],
)
def test_ratios_are_inside_and_wide_intervals_leave_the_axis(
    value: float, ends: tuple[float, float] | None, axis_of: tuple[float, float]
) -> None:
    result = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})])
    change, _ = change_of(result)
    change.value, change.interval = value, ends and Interval(low=ends[0], high=ends[1], kind="documents")
    low, high = axis_of
    margin = 0.08 * (high - low)
    picture = change_picture(result)
    assert axis(picture).range == pytest.approx((low - margin, high + margin))
    assert any(hovers(picture)) == (ends is not None)


@pytest.mark.parametrize(("share", "ends"), [(0.5, (-0.9, 0.95)), (-0.02, (-0.04, 0.01)), (0.7, None)])
def test_intervals_of_shares_are_inside(share: float, ends: tuple[float, float] | None) -> None:
    result = of_shares()
    change, _ = change_of(result)
    change.value, change.interval = share, ends and Interval(low=ends[0], high=ends[1], kind="samples")
    points = [100 * at for at in ends or (share,)]
    low, high = min(*points, -5), max(*points, 5)
    margin = 0.08 * (high - low)
    picture = change_picture(result)
    assert axis(picture).range == pytest.approx((low - margin, high + margin))
    assert any(hovers(picture)) == (ends is not None)


def test_trained_lengths_that_differ_are_named() -> None:
    result = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})])
    assert "trained lengths" not in numbers_picture(result).subtitle
    result.sources[0].trained_length = 128
    picture = numbers_picture(result)
    assert "trained lengths: 128 of a and 256 of b" in picture.subtitle
    assert [annotation.text for annotation in picture.figure.layout.annotations] == ["← trained length 128"]


def test_a_table_has_each_change_with_its_interval() -> None:
    for result, cell in ((of_perplexity(), ("0.905*", "0.863 to 0.949")), (of_shares(), ("+50*", "+20.7 to +72"))):
        name, cells = summaries(result)[-1].rows[0]
        assert (name, cells) == ("default (b)", [Cell(*cell)])
        change, _ = change_of(result)
        change.interval = None
        assert summaries(result)[-1].rows[0][1] == [Cell(cell[0])]
