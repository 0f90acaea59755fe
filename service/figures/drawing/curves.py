"""Lines with their intervals, thinned to the points that a screen can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Literal

import plotly.graph_objects as go

from service.evaluation.scores import Interval
from service.figures.drawing.axes import Ends, leave_room
from service.figures.drawing.charts import LINE, error_bars, grow, label, labels, note, room_for
from service.figures.drawing.style import LineStyle, line_style

MARKED = 32
"""Lines with more points have no markers."""
MOST_POINTS = 20_000
"""Points of all lines of a figure, at most."""
SHADE = 0.12
NOT_SHADED = "95 % intervals would hide the lines: the CSV file has them"
INTERVALS = (
    "95 % intervals are shades or whiskers where the lines stay readable. Whiskers of one length lie side by side. "
    "Hovering shows all intervals."
)
FEW_LINES, FEW_POINTS = 6, 8
"""Up to so many lines of so many points have whiskers where shades would hide the lines."""
LEAVE = "intervals leave the picture"
ALONE = "a point and no line"
ASIDE, APART = 0.01, 0.3
"""Half the distance of points that share an x, as a part of the axis. Together they take at most ``APART`` of the way
to the next x."""
Intervals = Literal["shades", "whiskers", "none"]
Point = tuple[float, float, Interval | None, str]
"""x, y, any interval, and the text that hovering adds."""


@dataclass(frozen=True)
class Curve:
    """A line: x and y [points], the ends of any intervals, the text that hovering adds to each point.

    Both ends of a point without an interval are its value.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    hover: Sequence[str] | None = field(default=None, repr=False)

    @classmethod
    def through(cls, name: str, points: Sequence[Point], text: Callable[[float], str]) -> Curve:
        """The curve through ``points``. Hovering shows their intervals too, whose ends ``text`` writes."""
        ends = [(interval.low, interval.high) if interval else (y, y) for _, y, interval, _ in points]
        return cls(
            name,
            [x for x, *_ in points],
            [y for _, y, *_ in points],
            [low for low, _ in ends],
            [high for _, high in ends],
            [f"{interval_text(at, text)}{more and f'<br>{more}'}" if at else more for *_, at, more in points],
        )

    @property
    def known(self) -> list[float]:
        """The y values without gaps."""
        return [value for value in self.y if value is not None]

    @property
    def ends(self) -> list[Ends]:
        """The ends of the intervals, point by point; empty where there are none."""
        return list(zip(self.low or (), self.high or (), strict=True))

    @property
    def bands(self) -> list[Curve]:
        """Its parts of two points at least that follow one another, each with an interval."""
        has_interval = [low < high for low, high in self.ends]
        runs = (list(run) for own, run in groupby(range(len(has_interval)), has_interval.__getitem__) if own)
        return [self.points(run) for run in runs if len(run) > 1]

    def points(self, kept: Sequence[int]) -> Curve:
        """The curve through some of its points."""
        return Curve(
            self.name,
            [self.x[at] for at in kept],
            [self.y[at] for at in kept],
            self.low and [self.low[at] for at in kept],
            self.high and [self.high[at] for at in kept],
            self.hover and [self.hover[at] for at in kept],
        )


def interval_text(interval: Interval, text: Callable[[float], str]) -> str:
    """The text of an interval for hovering."""
    return f"95 % interval {text(interval.low)} to {text(interval.high)}"


def thinned(curve: Curve, most: int) -> Curve:
    """``curve`` with at most ``most`` points (at least 4).

    Both ends stay, and the lowest and the highest point of every stretch between them. So no peak is lost.
    """
    count = len(curve.x)
    if count <= most:
        return curve
    stretches = (most - 2) // 2
    kept = {0, count - 1}
    for stretch in range(stretches):
        inside = range(1 + stretch * (count - 2) // stretches, 1 + (stretch + 1) * (count - 2) // stretches)
        known = [(value, at) for at in inside if (value := curve.y[at]) is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
    return curve.points(sorted(kept))


def add_curves(
    figure: go.Figure,
    curves: Sequence[Curve],
    one: str = "one length was measured",
    end: Callable[[float], str] | None = None,
    looks: Mapping[str, int] | None = None,
) -> bool:
    """Add a line per curve, each with its colour, dash and marker. Add a legend on the right with room for it.
    ``looks`` has the indices of their looks by name, for figures that share them.

    Intervals are shaded where the lines stay readable on the y axis, which must have its range. Else few lines have
    whiskers, aside from each other. Returns whether intervals are drawn. ``one`` is the reason why every curve may have
    a single point. With ``end``, the legend has the text of each line's last value, in the order of the lines' ends.
    """
    most = max(MOST_POINTS // max(len(curves), 1), 4)
    drawn = [thinned(curve, most) for curve in curves]
    intervals, texts = intervals_that_fit(figure, drawn), labels(curve.name for curve in drawn)
    for index, curve in enumerate(drawn):
        figure.add_traces(
            curve_traces(
                curve,
                line_style((looks or {}).get(curve.name, index)),
                str(index),
                text=texts[curve.name],
                intervals=intervals,
            )
        )
        if end is not None:
            name = f"{texts[curve.name]}: {end(curve.known[-1])}"
            figure.data[-1].update(name=name, legendrank=sum(other.known[-1] > curve.known[-1] for other in drawn))
    figure.update_layout(margin_r=room_for([curve.name for curve in curves], 76 if end is None else 130))
    grow(figure, (len(curves) + (end is not None)) * LINE)
    points, shown = (sum(len(curve.x) for curve in found) for found in (curves, drawn))
    if intervals == "none":
        note(figure, NOT_SHADED)
    elif _leave(figure, drawn):
        note(figure, LEAVE)
    if intervals == "whiskers":
        _put_side_by_side(figure)
    if shown < points:
        note(figure, f"{shown:,} of {points:,} points are drawn")
    if all(len(curve.known) <= 1 for curve in curves):
        _put_side_by_side(figure)
        note(figure, f"{one}: {ALONE}")
    return intervals != "none"


def _put_side_by_side(figure: go.Figure) -> None:
    """Move each line a little to its own side on a logarithmic axis. Hovering still shows the x of its points."""
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    places = sorted({math.log10(x) for line in lines for x in line.x})
    if figure.layout.xaxis.type != "log" or not places:
        return
    low, high = figure.layout.xaxis.range
    ways = [places[0] - low, high - places[-1], *(APART * (after - before) for before, after in pairwise(places))]
    room = min(ASIDE * len(lines) * (high - low), *ways)
    for place, line in enumerate(lines):
        shift = 10 ** (room * ((2 * place + 1) / len(lines) - 1))
        shown = [line.hovertemplate.replace("%{x:,}", f"{x:,}") for x in line.x]
        line.update(x=[x * shift for x in line.x], hovertemplate=shown)


def _leave(figure: go.Figure, curves: Sequence[Curve]) -> bool:
    """True if an interval of a point on the figure's y axis ends outside of it."""
    points = [
        (value, *ends)
        for curve in curves
        if curve.low and curve.high
        for value, *ends in zip(curve.y, curve.low, curve.high, strict=True)
        if value is not None
    ]
    if not points:
        return False
    bottom, top = _ends(figure)
    return any(bottom <= value <= top and (low < bottom or high > top) for value, low, high in points)


def _ends(figure: go.Figure) -> Ends:
    """The ends of the figure's y axis, which must have its range, as values."""
    axis = figure.layout.yaxis
    low, high = sorted(10.0**end if axis.type == "log" else end for end in axis.range)
    return low, high


def intervals_that_fit(figure: go.Figure, curves: Sequence[Curve]) -> Intervals:
    """The way to draw the intervals of ``curves`` on the figure's y axis; single points have bars in any case."""
    ends = [curve.ends for curve in curves if len(curve.x) > 1 and curve.ends]
    if len(ends) < 2:
        return "shades"
    low, high = _ends(figure)
    logarithmic = figure.layout.yaxis.type == "log"
    if leave_room(ends, low, high, logarithmic=logarithmic):
        return "shades"
    are_few = len(curves) <= FEW_LINES and all(len(curve.x) <= FEW_POINTS for curve in curves)
    return "whiskers" if are_few else "none"


def curve_traces(
    curve: Curve, style: LineStyle, group: str, *, text: str = "", faint: bool = False, intervals: Intervals = "shades"
) -> list[go.Scatter]:
    """The intervals, then the line; a single point has its interval as a bar.

    ``text`` is the curve's label among several.
    """
    name = text or label(curve.name)
    traces, bar = [], None
    if curve.low and curve.high and (len(curve.x) == 1 or intervals == "whiskers"):
        bar = error_bars(curve.y, curve.low, curve.high, style.colour)
    elif intervals == "shades":
        traces += [_shade(band, style, group) for band in curve.bands]
    marked = not faint and len(curve.x) <= MARKED
    traces.append(
        go.Scatter(
            x=list(curve.x),
            y=list(curve.y),
            name=name,
            legendgroup=group,
            mode="lines+markers" if marked else "lines",
            line={"color": style.colour, "dash": "solid" if faint else style.dash, "width": 0.8 if faint else 2},
            marker={"symbol": style.marker, "size": 8, "color": style.colour},
            error_y=bar,
            opacity=0.35 if faint else 1.0,
            showlegend=not faint,
            customdata=list(curve.hover or [""] * len(curve.x)),
            hovertemplate="%{x:,}: %{y:.5g}<br>%{customdata}" + f"<extra>{name}</extra>",
        )
    )
    return traces


def _shade(band: Curve, style: LineStyle, group: str) -> go.Scatter:
    return go.Scatter(
        x=[*band.x, *reversed(band.x)],
        y=[*(band.low or ()), *reversed(band.high or ())],
        fill="toself",
        fillcolor=style.colour,
        opacity=SHADE,
        mode="none",
        hoverinfo="skip",
        legendgroup=group,
        showlegend=False,
    )
