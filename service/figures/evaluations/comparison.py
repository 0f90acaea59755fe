"""Pictures of a comparison: the numbers by length, and each method against its partner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from service.evaluation.comparison.results import (
    ComparedMethod,
    ComparisonResult,
    ratio_text,
)
from service.evaluation.formatting import listed, percent, short_number
from service.evaluation.results import documents_text
from service.evaluation.scores import Interval
from service.figures.drawing.axes import beyond, linear_axis, share_axis, token_axis, value_axis
from service.figures.drawing.charts import mark_trained, new_figure, note
from service.figures.drawing.curves import INTERVALS, Curve, add_curves
from service.figures.drawing.style import FAINT
from service.figures.looks import looks
from service.figures.picture import Picture

LEAST, LEAST_POINTS = 0.01, 10
"""Least room of the axis: smaller differences look as small as they are."""
RATIO = "ratio of perplexities"
MOST_LINEAR = 4
"""Ratio of the ends of a linear axis of ratios, at most."""


def comparison_pictures(result: ComparisonResult) -> Iterator[Picture]:
    """All numbers by length, then ratios or differences where methods have partners."""
    yield numbers_picture(result)
    if result.changed():
        yield change_picture(result)


def numbers_picture(result: ComparisonResult) -> Picture:
    """A line per method of every result, with its intervals."""
    title = f"{result.scores().title} by context length: {result.of()}"
    text = short_number if result.lower_is_better else percent
    curves = [
        Curve.through(method.name, [(at.length, at.value, at.interval, "") for at in method.lengths], text)
        for method in result.methods
    ]
    if result.lower_is_better:
        y = value_axis(result.measure, [curve.known for curve in curves], [curve.ends for curve in curves])
    else:
        y = share_axis(result.measure)
    figure, x = _figure(title, f"{_subtitle(result)}{_leaving(curves, y)}", result)
    figure.update_layout(xaxis=x, yaxis=y, showlegend=True)
    add_curves(figure, curves, end=text, looks=looks(result.names()))
    better = "Lower" if result.lower_is_better else "Higher"
    caption = " ".join([f"{better} is better. {INTERVALS}", *result.cautions()])
    return Picture("comparison", title, figure, result.rows(), caption)


def change_picture(result: ComparisonResult) -> Picture:
    """A line per method with a partner: the ratio to it, or the difference from it."""
    kind = "ratio" if result.lower_is_better else "difference"
    title = f"{result.scores().title} against {result.against()} by context length"
    text, times = (ratio_text, 1) if result.lower_is_better else ("{:+.3g}".format, 100)
    curves = [_change_curve(method, text, times) for method in result.changed()]
    level = 1.0 if result.lower_is_better else 0.0
    y = _change_axis(result, curves, level)
    figure, x = _figure(title, f"{_subtitle(result)}{_leaving(curves, y)}", result)
    figure.update_layout(xaxis=x, yaxis=y, showlegend=True)
    figure.add_hline(y=level, line={"color": FAINT, "width": 1.2})
    add_curves(figure, curves, end=text, looks=looks(result.names()))
    side = "Below" if result.lower_is_better else "Above"
    caption = (
        f"{side} the line at {level:.0f} is better than {result.against()}. The intervals are of the {kind}: one that "
        "does not reach the line is sure."
    )
    caption = " ".join([caption, *result.cautions()])
    return Picture("change", title, figure, result.rows(), caption)


def _figure(title: str, subtitle: str, result: ComparisonResult) -> tuple[Any, dict[str, Any]]:
    """An empty figure over the lengths, with a mark at every trained length; its x axis."""
    figure = new_figure(title, subtitle)
    x = token_axis("context length, tokens", result.scores().lengths(), result.trained_length)
    trained = list(dict.fromkeys(source.trained_length for source in result.sources))
    mark_trained(figure, trained[0], x)
    if len(trained) > 1:
        each = [f"{source.trained_length:,} of {source.name}" for source in result.sources]
        note(figure, f"trained lengths: {listed(each)}")
    return figure, x


def _leaving(curves: Sequence[Curve], y: dict[str, Any]) -> str:
    """The note on lines that leave the axis ``y``, as a logarithmic one may."""
    return beyond([curve.known for curve in curves], y) if y.get("type") == "log" else ""


def _subtitle(result: ComparisonResult) -> str:
    return documents_text(result.documents) if result.documents else f"samples of {result.compared}"


def _change_curve(method: ComparedMethod, text: Callable[[float], str], times: int) -> Curve:
    """``times`` each change: shares are in points."""
    changes = [(at.length, at.change) for at in method.lengths if at.change is not None]
    points = [(length, times * change.value, _scaled(change.interval, times), "") for length, change in changes]
    return Curve.through(method.name, points, text)


def _scaled(interval: Interval | None, times: int) -> Interval | None:
    return interval and interval.model_copy(update={"low": times * interval.low, "high": times * interval.high})


def _change_axis(result: ComparisonResult, curves: Sequence[Curve], level: float) -> dict[str, Any]:
    """With the level inside, logarithmic for ratios far apart. A linear one has every line inside. Intervals of ratios
    widen it by half its room on each side at most, those of shares are inside too."""
    values = [value for curve in curves for value in (*curve.known, level)]
    if result.lower_is_better and max(values) > MOST_LINEAR * min(values):
        return value_axis(
            RATIO, [[*curve.known, level] for curve in curves], [[*curve.ends, (level, level)] for curve in curves]
        )
    least = LEAST if result.lower_is_better else LEAST_POINTS
    low, high = min(*values, level - least / 2), max(*values, level + least / 2)
    room = high - low if result.lower_is_better else 400
    low = max(low - room / 2, min([low, *(end for curve in curves for end in curve.low or ())]))
    high = min(high + room / 2, max([high, *(end for curve in curves for end in curve.high or ())]))
    margin = 0.08 * (high - low)
    if result.lower_is_better:
        return linear_axis(RATIO, low - margin, high + margin)
    return linear_axis("difference of shares, points", low - margin, high + margin)
