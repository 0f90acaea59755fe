"""Layouts of a figure on a page: one for wide screens, one for telephones. The page's text has the titles."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from service.figures.drawing.bars import WIDTH as BAR_WIDTH
from service.figures.drawing.charts import CHAR, GAP, LINE

NARROW = 340
"""Width of a figure on a telephone, pixels."""
SAMPLE = 50
"""Width of the line before a name of a legend, pixels."""
TITLES = 56
"""Height of the titles of a figure, pixels."""
LEFT, RIGHT = 56, 12
COLOUR_BAR = 72
BARS_TOP = 24
"""Height saved above bars, which have no text there, pixels."""
BAR_ROWS = {1: 60, 2: 86}
"""Pixels from one bar to the next, by the lines of text above each. Of two, the first is the name."""

TEXT_LINE = 16
"""Height of a line of a text above a bar, pixels."""

Layout = dict[str, Any]


def wide(figure: go.Figure) -> Layout:
    """The figure's own layout without titles."""
    layout: Layout = figure.layout.to_plotly_json()
    layout.pop("title")
    above = TITLES + (BARS_TOP if _has_bars(figure) else 0)
    layout["height"] -= above
    layout["margin"]["t"] -= above
    for name, axis in layout.items():
        if name.startswith(("xaxis", "yaxis")):
            axis["automargin"] = True
    return layout


def narrow(figure: go.Figure) -> Layout:
    """One panel below the other, the legend or the colour bar under them, names of bars above their bars."""
    layout = wide(figure)
    margin = layout["margin"] = layout["margin"] | {"l": LEFT, "r": RIGHT}
    if _has_bars(figure):
        _names_above_bars(figure, layout)
        return layout
    _stack(figure, layout)
    names = [trace.name for trace in figure.data if _in_legend(trace)]
    below = 0
    if len(names) > 1 or layout.get("showlegend") or any(trace.showlegend for trace in figure.data):
        below = _legend_below(layout, names)
    elif "coloraxis" in layout and any(trace.type == "heatmap" for trace in figure.data):
        below = COLOUR_BAR
        layout["coloraxis"]["colorbar"] = layout["coloraxis"].get("colorbar", {}) | {
            **{"orientation": "h", "thickness": 12, "len": 0.9},
            **{"x": 0.5, "xanchor": "center", "y": 0, "yanchor": "bottom", "yref": "container"},
        }
    margin["b"] += below
    layout["height"] += below
    return layout


def _has_bars(figure: go.Figure) -> bool:
    return any(trace.type == "bar" for trace in figure.data)


def _in_legend(trace: Any) -> bool:
    return trace.type == "scatter" and trace.showlegend is not False and bool(trace.name) and trace.mode != "none"


def _legend_below(layout: Layout, names: list[str]) -> int:
    """Put the legend under the axes, a name per line whatever its font; returns its height in pixels."""
    title = layout["legend"].get("title")
    height = (len(names) + bool(title)) * LINE + 8
    layout["legend"] = {
        **({"title": {**title, "side": "top"}} if title else {}),
        **{"orientation": "h", "entrywidth": NARROW - SAMPLE},
        **{"x": 0, "xref": "container", "xanchor": "left"},
        **{"y": 0, "yref": "container", "yanchor": "bottom", "tracegroupgap": 2, "maxheight": height},
    }
    return height


def _stack(figure: go.Figure, layout: Layout) -> None:
    """Put panels one below the other, each with its height."""
    panels = list(dict.fromkeys((trace.xaxis or "x", trace.yaxis or "y") for trace in figure.data))
    if len(panels) < 2:
        return
    axes = [(layout[f"xaxis{x[1:]}"], layout[f"yaxis{y[1:]}"]) for x, y in panels]
    inner = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    heights = [inner * (y["domain"][1] - y["domain"][0]) for _, y in axes]
    titles = {(round(note["x"], 6), round(note["y"], 6)): note for note in layout.get("annotations", ())}
    _share_titles([x for x, _ in axes], everywhere=False)
    _share_titles([y for _, y in axes], everywhere=True)
    gaps = [GAP + LINE * bool(x.get("title", {}).get("text")) for x, _ in axes[:-1]] + [0]
    top = whole = sum(heights) + sum(gaps)
    for (x, y), height, gap in zip(axes, heights, gaps, strict=True):
        title = titles.get((round(sum(x["domain"]) / 2, 6), round(y["domain"][1], 6)))
        if title is not None:
            title |= {"x": 0, "xanchor": "left", "y": top / whole}
        x["domain"] = [0.0, 1.0]
        y |= {"domain": [(top - height) / whole, top / whole], "showticklabels": True}
        top -= height + gap
    layout["height"] += round(whole - inner)


def _share_titles(axes: list[Layout], *, everywhere: bool) -> None:
    """If all panels have the same title, put it at every panel, or at the last one only."""
    titles = {axis["title"]["text"] for axis in axes if axis.get("title", {}).get("text")}
    if len(titles) != 1:
        return
    (shared,) = titles
    for axis in axes:
        axis["title"] = {"text": shared if everywhere or axis is axes[-1] else ""}


def _names_above_bars(figure: go.Figure, layout: Layout) -> None:
    """Put names and texts above the bars, which then have the full width. Long ones take two lines."""
    names = layout["yaxis"]["ticktext"]
    layout["yaxis"] |= {"showticklabels": False, "ticktext": list(names)}
    notes = [note for note in layout["annotations"] if note.get("yref") == "y" and note.get("xref") == "paper"]
    longest = max((len(html.unescape(f"{names[note['y']]}  {note['text']}")) for note in notes), default=0)
    lines = 1 if CHAR * longest <= NARROW - 2 * RIGHT else 2
    row = BAR_ROWS[lines]
    for note in notes:
        text = f"<b>{names[note['y']]}</b>{'  ' if lines == 1 else '<br>'}{note['text']}"
        above = (BAR_WIDTH * row + lines * TEXT_LINE) / 2
        note |= {"x": 0, "xshift": 0, "yshift": above, "align": "left", "text": text}
    layout["margin"] |= {"l": RIGHT, "t": layout["margin"]["t"] + BARS_TOP * lines}
    layout["height"] = layout["margin"]["t"] + layout["margin"]["b"] + row * len(names)
