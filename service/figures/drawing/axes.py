"""Layouts of axes: linear, logarithmic, tokens, shares, names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Any, TypeVar

from service.evaluation.formatting import percent
from service.figures.drawing.style import GRID, tick_text, value_ticks

OFF_SCALE, MOST_RANGE = 20, 1e9
"""Upper end of an axis, at most: ``OFF_SCALE`` times the curves' median peak, ``MOST_RANGE`` times the least value."""
MOST_SHADED = 0.5
"""Share of an axis that intervals may cover: beyond it they merge and hide the lines."""


def linear_axis(title: str, low: float, high: float, *, ticks: Sequence[float] | None = None) -> dict[str, Any]:
    """Layout of a linear axis; ``low`` may be above ``high``."""
    shown = {} if ticks is None else {"tickvals": list(ticks), "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    return {"title": {"text": title}, "range": [low, high], "gridcolor": GRID, "zeroline": False, **shown}


def share_axis(title: str) -> dict[str, Any]:
    """From 0 to 100 %."""
    shares = [0, 0.25, 0.5, 0.75, 1]
    return {**linear_axis(title, -0.03, 1.03, ticks=shares), "ticktext": [percent(share) for share in shares]}


def bar_share_axis(title: str) -> dict[str, Any]:
    """From 0 to 100 % for bars, with room for the end of the longest."""
    return {**linear_axis(title, 0, 1.05, ticks=[0, 0.5, 1]), "ticktext": ["0 %", "50 %", "100 %"]}


def loss_axis(title: str, losses: Sequence[float]) -> dict[str, Any]:
    """Linear axis over ``losses`` in nats, with a margin."""
    margin = max(0.05 * (max(losses) - min(losses)), 0.02)
    return linear_axis(title, min(losses) - margin, max(losses) + margin)


def percent_bar(title: str) -> dict[str, Any]:
    """Colour bar from 0 to 100 %."""
    shares = [0, 0.25, 0.5, 0.75, 1]
    return {"title": {"text": title}, "tickvals": shares, "ticktext": [percent(share) for share in shares]}


def log_axis(title: str, low: float, high: float, *, ticks: Sequence[float] | None = None) -> dict[str, Any]:
    """Layout of a logarithmic axis with round numbers on it."""
    ticks = value_ticks(low, high) if ticks is None else ticks
    return {
        "type": "log",
        "title": {"text": title},
        "range": [math.log10(low), math.log10(high)],
        "tickvals": list(ticks),
        "ticktext": [tick_text(tick) for tick in ticks],
        "gridcolor": GRID,
        "minor": {"showgrid": False},
    }


Ends = tuple[float, float]
Item = TypeVar("Item")


def value_axis(title: str, curves: Sequence[Sequence[float]], intervals: Sequence[Sequence[Ends]]) -> dict[str, Any]:
    """Logarithmic axis over ``value_range``."""
    return log_axis(title, *value_range(curves, intervals))


def value_range(curves: Sequence[Sequence[float]], intervals: Sequence[Sequence[Ends]]) -> Ends:
    """Ends of a logarithmic axis over the values of several curves, with a margin.

    A curve above ``OFF_SCALE`` or ``MOST_RANGE`` leaves the axis. Intervals, a pair of ends per value, widen the axis
    by a factor of two at most.
    """
    highest = [max(curve) for curve in curves if curve]
    least = min(value for curve in curves for value in curve)
    most = min(max(highest), OFF_SCALE * median_low(highest), MOST_RANGE * least)
    low, high = least, most
    for curve, ends in zip(curves, intervals, strict=True):
        low = min([low, *(max(end, least / 2) for end, _ in ends)])
        high = max([high, *(min(end, 2 * most) for value, (_, end) in zip(curve, ends, strict=True) if value <= most)])
    margin = max((high / low) ** 0.04, 1.02)
    return low / margin, high * margin


def leave_room(intervals: Sequence[Sequence[Ends]], low: float, high: float, *, logarithmic: bool) -> bool:
    """True if intervals [curves, points] cover at most ``MOST_SHADED`` of the axis from ``low`` to ``high``."""
    scale = math.log if logarithmic else float
    bottom, top = scale(low), scale(high)
    covered = 0.0
    for curve in intervals:
        shares = [scale(min(max(end, low), high)) - scale(min(max(start, low), high)) for start, end in curve]
        covered += sum(shares) / max(len(shares), 1) / (top - bottom)
    return covered <= MOST_SHADED


def beyond(curves: Sequence[Sequence[float]], axis: dict[str, Any]) -> str:
    """A note on lines that leave a logarithmic axis at the top; empty without such lines."""
    most = max(value for curve in curves for value in curve)
    if math.log10(most) <= axis["range"][1]:
        return ""
    return f" · lines that leave the picture reach {tick_text(float(format(most, '.4g')))}"


def token_axis(title: str, lengths: Sequence[int], trained_length: int) -> dict[str, Any]:
    """Logarithmic axis of tokens over ``lengths``, with the trained length if it is near."""
    near = [trained_length] if min(lengths) / 4 <= trained_length <= max(lengths) * 4 else []
    low, high = min([*lengths, *near]), max([*lengths, *near])
    margin = max((high / low) ** 0.03, 1.05) if high > low else 2**0.5
    return log_axis(title, low / margin, high * margin, ticks=thinned(sorted(set(lengths)), 10))


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` of the items, at equal steps back from the last."""
    every = -(-len(items) // most)
    return list(items[::-1][::every][::-1])


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` of the items (at least 2), at equal steps, with both ends."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def category_axis(title: str, names: Sequence[str], *, reverse: bool = False) -> dict[str, Any]:
    """Layout of an axis with the positions 0, 1, ... for the names."""
    ends = [-0.5, len(names) - 0.5]
    return {
        "title": {"text": title},
        "range": ends[::-1] if reverse else ends,
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "gridcolor": GRID,
        "zeroline": False,
    }
