"""Layouts of a figure on a page: one for wide screens, one for telephones. The page's text has the titles."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from service.figures.drawing.charts import GAP, LINE

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
BAR_ROW = 60
"""Pixels from one bar to the next, with the name and the text above each bar."""

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
    if len(names) > 1 or layout.get("showlegend"):
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
    whole = sum(heights) + GAP * (len(panels) - 1)
    titles = {(round(note["x"], 6), round(note["y"], 6)): note for note in layout.get("annotations", ())}
    _share_titles([x for x, _ in axes], everywhere=False)
    _share_titles([y for _, y in axes], everywhere=True)
    top = whole
    for (x, y), height in zip(axes, heights, strict=True):
        title = titles.get((round(sum(x["domain"]) / 2, 6), round(y["domain"][1], 6)))
        if title is not None:
            title |= {"x": 0, "xanchor": "left", "y": top / whole}
        x["domain"] = [0.0, 1.0]
        y |= {"domain": [(top - height) / whole, top / whole], "showticklabels": True}
        top -= height + GAP
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
    """Put names and texts above the bars, which then have the full width."""
    names = layout["yaxis"]["ticktext"]
    layout["yaxis"] |= {"showticklabels": False, "ticktext": list(names)}
    for note in layout["annotations"]:
        if note.get("yref") == "y" and note.get("xref") == "paper":
            text = f"<b>{names[note['y']]}</b>  {note['text']}"
            note |= {"x": 0, "xshift": 0, "yshift": 0.44 * BAR_ROW, "text": text}
    layout["margin"] |= {"l": RIGHT, "t": layout["margin"]["t"] + BARS_TOP}
    layout["height"] = layout["margin"]["t"] + layout["margin"]["b"] + BAR_ROW * len(names)
