"""Titles and margins of every Plotly figure, and the mark at the trained length.

Every figure has explicit margins, ranges and ticks, so that the page and the PNG look alike.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from service.figures.drawing.style import FAINT, GRID, INK, PAPER, RULE, different, shortened

LABEL_CHARS = 40
SUBTITLE = 150
"""Characters of a subtitle that a PNG has room for."""
CHAR, LINE = 7.0, 22
"""Width of a character of a label and height of a line of a legend, pixels."""
TOP, BOTTOM, LEFT, RIGHT = 96, 64, 76, 24
HEIGHT, TITLE_Y, GAP = 480, 16, 64
"""``GAP`` is the space between two rows of panels."""
MARK = {"color": FAINT, "dash": "dash", "width": 1.2}
SHADE: dict[str, Any] = {"fillcolor": "#000000", "opacity": 0.035, "line_width": 0, "layer": "below"}
NOTE: dict[str, Any] = {"font": {"size": 11, "color": FAINT}, "showarrow": False}
AXIS: dict[str, Any] = {
    **{"gridcolor": GRID, "linecolor": RULE, "zerolinecolor": RULE, "zerolinewidth": 2},
    **{"automargin": True, "title": {"standoff": 15}},
}
TEMPLATE: dict[str, Any] = {
    "layout": {
        **{"paper_bgcolor": PAPER, "plot_bgcolor": PAPER, "xaxis": AXIS, "yaxis": AXIS},
        **{"coloraxis": {"colorbar": {"outlinewidth": 0}}, "hoverlabel": {"align": "left"}},
    }
}
"""Plotly's own templates add 7 kB of styles that no figure here uses."""


def label(text: str, most: int = LABEL_CHARS) -> str:
    """A name from a request as the text of a figure."""
    return _written(shortened(text, most))


def labels(names: Iterable[str]) -> dict[str, str]:
    """The label of each of ``names``, which differ where the names do."""
    return {name: _written(text) for name, text in different(names, LABEL_CHARS).items()}


def _written(text: str) -> str:
    # A pair of dollar signs would be read as a formula.
    return html.escape(text).replace("$", "&#36;")


def new_figure(title: str, subtitle: str, *, height: int = HEIGHT, left: int = LEFT) -> go.Figure:
    """An empty figure with its titles; pixels."""
    figure = go.Figure()
    write_layout(figure, title, subtitle, height=height, left=left)
    return figure


def write_layout(
    figure: go.Figure, title: str, subtitle: str, *, height: int = HEIGHT, left: int = LEFT, right: int = RIGHT
) -> None:
    """Titles, margins and looks of ``figure``; pixels."""
    figure.update_layout(
        overwrite=True,  # merging the template into Plotly's keeps both, and takes ten times as long
        template=TEMPLATE,
        height=height,
        margin={"t": TOP, "b": BOTTOM, "l": left, "r": right},
        font={"color": INK, "size": 12},
        title={
            "text": f"<b>{label(title, 100)}</b>",
            "subtitle": {"text": label(subtitle, 200), "font": {"size": 12, "color": FAINT}},
            "x": 0.01,
            "xanchor": "left",
            "y": 1 - TITLE_Y / height,
            "yanchor": "top",
            "font": {"size": 17},
        },
        hovermode="closest",
        legend={"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "tracegroupgap": 2},
    )


def note(figure: go.Figure, text: str) -> None:
    """Put ``text`` before the subtitle, for facts about how the figure is drawn."""
    subtitle = figure.layout.title.subtitle
    subtitle.text = f"{label(text, 200)} · {subtitle.text}" if subtitle.text else label(text, 200)


def room_for(names: Sequence[str], extra: int) -> int:
    """Width of the longest of ``names`` as a label, and ``extra``, pixels."""
    return int(CHAR * max(map(len, different(names, LABEL_CHARS).values()), default=0)) + extra


def grow(figure: go.Figure, content: float) -> None:
    """Increase the height so that ``content`` pixels fit beside the axes."""
    height = int(max(figure.layout.height, content + TOP + BOTTOM))
    figure.update_layout(height=height, title_y=1 - TITLE_Y / height)


def mark_trained(
    figure: go.Figure, trained_length: int, axis: dict[str, Any], *, named: bool = True, **panel: int
) -> None:
    """Draw a dashed line at the trained length on the x axis ``axis`` and a shade right of it.

    Outside the axis, the name of the line has an arrow towards it.
    """
    low, high = axis["range"]
    at, end = (math.log10(trained_length), 10.0**high) if axis.get("type") == "log" else (trained_length, high)
    share = (at - low) / (high - low)
    name, ref, height = f"trained length {trained_length:,}", "x", "y domain"
    if low < at < high:
        figure.add_vline(x=trained_length, line=MARK, **panel)
        ref, height = figure.layout.shapes[-1].xref, figure.layout.shapes[-1].yref
        figure.add_vrect(x0=trained_length, x1=end, **SHADE, **panel)
    else:
        at, name = (low, f"← {name}") if at <= low else (high, f"{name} →")
    anchor = "left" if share < 0.1 else "center" if share < 0.9 else "right"
    if named:
        figure.add_annotation(x=at, xref=ref, xanchor=anchor, y=1, yref=height, yanchor="bottom", text=name, **NOTE)


def mark_trained_height(
    figure: go.Figure, trained_length: int, axis: dict[str, Any], *, right: bool, below: bool, **panel: int
) -> None:
    """Draw a dashed line at the trained length on the y axis ``axis``, with its name, and a shade above it.

    The name is at one end of the line, on the side without curves.
    """
    logarithmic, (_, high) = axis.get("type") == "log", axis["range"]
    at, end = (math.log10(trained_length), 10.0**high) if logarithmic else (trained_length, high)
    figure.add_hline(y=trained_length, line=MARK, **panel)
    x, y = figure.layout.shapes[-1].xref, figure.layout.shapes[-1].yref
    figure.add_hrect(y0=trained_length, y1=end, **SHADE, **panel)
    side = {"x": 1, "xanchor": "right", "xshift": -4} if right else {"x": 0, "xanchor": "left", "xshift": 4}
    side |= {"yanchor": "top", "yshift": -5} if below else {"yanchor": "bottom", "yshift": 2}
    figure.add_annotation(xref=x, y=at, yref=y, text=f"trained length {trained_length:,}", **side, **NOTE)


def error_bars(
    values: Sequence[float | None], lows: Sequence[float], highs: Sequence[float], colour: str
) -> dict[str, Any] | None:
    """Plotly's error bars around values; None where no value has an interval."""
    points = list(zip(values, lows, highs, strict=True))
    known = [None if value is None or low == high else (value - low, high - value) for value, low, high in points]
    if not any(known):
        return None
    less, more = ([both and max(0.0, both[side]) for both in known] for side in (0, 1))
    ends = {"array": more, "arrayminus": less}
    return {"type": "data", "symmetric": False, **ends, "color": colour, "thickness": 1.2}
