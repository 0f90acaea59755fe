"""What the Plotly figures are made of: titles, curves with intervals, bars.

Every figure has explicit margins, ranges and ticks, so that the page and the PNG look alike.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from service.figures.axes import category_axis
from service.figures.style import COLOURS, FAINT, INK, LineStyle, line_style, shortened

LABEL_CHARS = 40
CHAR, LINE = 7.0, 22
"""Pixels that a character of a label takes, and a line of a legend."""
TOP, BOTTOM, LEFT, RIGHT = 96, 64, 76, 24
HEIGHT, TITLE_Y = 480, 16
HATCHES = ("", "/", "x", ".", "\\", "-", "|", "+")
MARKED = 32
"""Above so many points a line has no markers."""


@dataclass(frozen=True)
class Curve:
    """A line: x and y [points], the ends of its intervals where it has them, what hovering adds to each point."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    hover: Sequence[str] | None = field(default=None, repr=False)

    @property
    def known(self) -> list[float]:
        """The y that there are."""
        return [value for value in self.y if value is not None]


def label(text: str, most: int = LABEL_CHARS) -> str:
    """A name from a request as the text of a figure."""
    # A pair of dollar signs would be read as a formula.
    return html.escape(shortened(text, most)).replace("$", "&#36;")


def new_figure(title: str, subtitle: str, *, height: int = HEIGHT, left: int = LEFT, right: int = RIGHT) -> go.Figure:
    """An empty figure with its titles; pixels."""
    figure = go.Figure()
    write_layout(figure, title, subtitle, height=height, left=left, right=right)
    return figure


def write_layout(
    figure: go.Figure, title: str, subtitle: str, *, height: int = HEIGHT, left: int = LEFT, right: int = RIGHT
) -> None:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"t": TOP, "b": BOTTOM, "l": left, "r": right},
        font={"color": INK, "size": 12},
        title={
            "text": f"<b>{label(title, 100)}</b>",
            "subtitle": {"text": label(subtitle, 160), "font": {"size": 12, "color": FAINT}},
            "x": 0.01,
            "xanchor": "left",
            "y": 1 - TITLE_Y / height,
            "yanchor": "top",
            "font": {"size": 17},
        },
        hovermode="closest",
        legend={"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"},
    )


def room_for(names: Sequence[str], extra: int = 0) -> int:
    """Pixels that the longest of ``names`` takes as a label."""
    return int(CHAR * max((min(len(name), LABEL_CHARS) for name in names), default=0)) + extra


def curve_traces(curve: Curve, style: LineStyle, group: str, *, faint: bool = False) -> list[go.Scatter]:
    """The interval as a closed shape where there is one, then the line."""
    name = label(curve.name)
    traces = []
    if curve.low is not None and curve.high is not None:
        traces.append(
            go.Scatter(
                x=[*curve.x, *reversed(curve.x)],
                y=[*curve.low, *reversed(curve.high)],
                fill="toself",
                fillcolor=style.colour,
                opacity=0.15,
                mode="none",
                hoverinfo="skip",
                legendgroup=group,
                showlegend=False,
            )
        )
    marked = not faint and len(curve.x) <= MARKED
    traces.append(
        go.Scatter(
            x=list(curve.x),
            y=list(curve.y),
            name=name,
            legendgroup=group,
            mode="lines+markers" if marked else "lines",
            line={"color": style.colour, "dash": "solid" if faint else style.dash[1], "width": 0.8 if faint else 2},
            marker={"symbol": style.marker[1], "size": 8, "color": style.colour},
            opacity=0.35 if faint else 1.0,
            showlegend=not faint,
            customdata=list(curve.hover or [""] * len(curve.x)),
            hovertemplate="%{x:,}: %{y:.5g}<br>%{customdata}" + f"<extra>{name}</extra>",
        )
    )
    return traces


def add_curves(figure: go.Figure, curves: Sequence[Curve]) -> None:
    """One line per curve, told apart by colour, dash and marker, and a legend on the right with room for it."""
    for index, curve in enumerate(curves):
        figure.add_traces(curve_traces(curve, line_style(index), str(index)))
    figure.update_layout(margin_r=room_for([curve.name for curve in curves], 76))
    grow(figure, len(curves) * LINE)


def grow(figure: go.Figure, content: float) -> None:
    """Make the figure high enough for ``content`` pixels beside its axes."""
    height = int(max(figure.layout.height, content + TOP + BOTTOM))
    figure.update_layout(height=height, title_y=1 - TITLE_Y / height)


def mark_trained(
    figure: go.Figure, trained_length: int, axis: dict[str, Any], named: bool = True, **panel: int
) -> None:
    """A dashed line at the trained length on the x axis ``axis``, where it is on the picture."""
    low, high = axis["range"]
    at = math.log10(trained_length) if axis.get("type") == "log" else trained_length
    if not low < at < high:
        return
    figure.add_vline(x=trained_length, line={"color": FAINT, "dash": "dash", "width": 1.2}, **panel)
    if not named:
        return
    middle = (at - low) / (high - low) < 0.9
    ref = figure.layout.shapes[-1].xref
    figure.add_annotation(
        x=at,
        xref=ref,
        y=1,
        yref=figure.layout.shapes[-1].yref,
        xanchor="center" if middle else "right",
        yanchor="bottom",
        text=f"trained length {trained_length:,}",
        font={"size": 11, "color": FAINT},
        showarrow=False,
    )


@dataclass(frozen=True)
class Bars:
    """A horizontal bar per name, from the top: its value (None: no bar), what is written beside it, its interval."""

    names: Sequence[str]
    values: Sequence[float | None]
    texts: Sequence[str]
    intervals: Sequence[tuple[float, float] | None] | None = None


def add_bars(figure: go.Figure, bars: Bars, axis: dict[str, Any]) -> None:
    """In the colours of the lines, with hatches for print; values stand at the right where no interval covers them."""
    names = [label(name) for name in bars.names]
    for index, (name, value, text) in enumerate(zip(names, bars.values, bars.texts, strict=True)):
        figure.add_bar(
            x=[value],
            y=[index],
            orientation="h",
            width=0.62,
            name=name,
            hovertemplate=f"{name}: {html.escape(text)}<extra></extra>",
            marker={
                "color": COLOURS[index % len(COLOURS)],
                "pattern": {
                    "shape": HATCHES[index % len(HATCHES)],
                    "fillmode": "overlay",
                    "fgcolor": "white",
                    "solidity": 0.15,
                },
            },
            error_x=_error_bar(value, None if bars.intervals is None else bars.intervals[index]),
            showlegend=False,
        )
    figure.update_layout(
        barmode="overlay",
        xaxis=axis,
        yaxis={**category_axis("", names, reverse=True), "showgrid": False},
        margin={"l": room_for(bars.names, 20), "r": room_for(bars.texts, 28)},
        height=TOP + BOTTOM + 34 * len(names) + 12,
    )
    for index, text in enumerate(bars.texts):
        figure.add_annotation(
            x=1, xref="paper", xanchor="left", xshift=8, y=index, yref="y", text=html.escape(text), showarrow=False
        )
    figure.update_layout(title_y=1 - TITLE_Y / figure.layout.height)


def _error_bar(value: float | None, ends: tuple[float, float] | None) -> dict[str, Any] | None:
    if value is None or ends is None:
        return None
    more, less = [ends[1] - value], [value - ends[0]]
    return {"type": "data", "symmetric": False, "array": more, "arrayminus": less, "color": INK, "thickness": 1.2}


def counted(count: int, noun: str) -> str:
    """ "1 prompt", "3 prompts"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
