"""Plotly's traces drawn into Matplotlib's axes: lines, closed shapes, bars, heat maps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize, to_rgb
from matplotlib.lines import Line2D

from service.figures.drawing.raster_text import POINTS, text
from service.figures.drawing.style import INK

MARKERS = {
    **{"circle": "o", "square": "s", "triangle-up": "^", "diamond": "D", "triangle-down": "v"},
    **{"cross": "P", "x": "X", "triangle-left": "<", "triangle-right": ">", "star": "*"},
}
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
"""Matplotlib's names by Plotly's."""
HATCH_SCALE = 3
MOST_BEYOND = 12
"""Triangles of one line at the upper edge."""


class Colours(NamedTuple):
    """Colours of heat maps, and the values at both ends."""

    ramp: Colormap
    norm: Normalize


def draw_scatter(axes: Axes, trace: dict[str, Any], order: int) -> None:
    """Draw a line, its markers and intervals, or a filled shape; triangles mark points above a log axis."""
    x, y = numbers(trace["x"]), numbers(trace["y"])
    if trace.get("fill") == "toself":
        axes.fill(x, y, color=trace["fillcolor"], alpha=trace.get("opacity", 1.0), lw=0, zorder=1.5)
    if trace.get("mode", "lines") == "none":
        return
    (line,) = axes.plot(x, y, **_line_style(trace), zorder=2 + order / 1000)
    line.set_clip_on(trace.get("cliponaxis", True))
    _draw_intervals(axes, trace.get("error_y") or {}, y, x, sideways=False)
    top = max(axes.get_ylim()) if axes.get_yscale() == "log" else np.inf
    above = x[y > top]
    above = above[:: -(-len(above) // MOST_BEYOND) or 1]
    look: dict[str, Any] = {"marker": "^", "color": line.get_color(), "ec": "white", "lw": 0.6, "zorder": 5}
    axes.scatter(above, [top] * len(above), 40, clip_on=False, **look)


def legend_line(trace: dict[str, Any]) -> Line2D:
    """The sample of a line in a legend."""
    return Line2D([0, 1], [0, 0], **_line_style(trace))


def _line_style(trace: dict[str, Any]) -> dict[str, Any]:
    mode, line, marker = trace.get("mode", "lines"), trace.get("line", {}), trace.get("marker", {})
    colour = line.get("color") or marker.get("color") or INK
    dash = DASHES[line.get("dash", "solid")]
    return {
        "color": colour,
        "ls": dash if "lines" in mode else "",
        "lw": line.get("width", 2) * 0.9,
        "marker": MARKERS[marker.get("symbol", "circle")] if "markers" in mode else "",
        "ms": marker.get("size", 6) * 0.75,
        "mfc": marker.get("color") or colour,
        "mec": "white",
        "mew": 0.6,
        "alpha": trace.get("opacity", 1.0),
        "drawstyle": "steps-post" if line.get("shape") == "hv" else "default",
    }


def draw_bars(axes: Axes, trace: dict[str, Any]) -> None:
    """Draw bars from zero, or from the low end of a logarithmic axis, with their intervals."""
    sideways = trace.get("orientation") == "h"
    values, places = (numbers(trace[name]) for name in ("xy" if sideways else "yx"))
    marker = trace.get("marker", {})
    colours, hatches = marker.get("color", INK), (marker.get("pattern") or {}).get("shape", "")
    colours = [colours] * len(values) if isinstance(colours, str) else list(colours)
    hatches = [hatches] * len(values) if isinstance(hatches, str) else list(hatches)
    logarithmic = (axes.get_xscale() if sideways else axes.get_yscale()) == "log"
    start = min(axes.get_xlim() if sideways else axes.get_ylim()) if logarithmic else 0.0
    sizes, width = values - start, trace.get("width") or 0.7
    drawn = (
        axes.barh(places, sizes, width, left=start, color=colours, zorder=2)
        if sideways
        else axes.bar(places, sizes, width, bottom=start, color=colours, zorder=2)
    )
    for patch, hatch in zip(drawn, hatches, strict=True):
        patch.set_hatch(hatch * HATCH_SCALE)
        patch.set_edgecolor("white" if hatch else "none")
        patch.set_linewidth(0)
    _draw_intervals(axes, trace.get("error_x" if sideways else "error_y") or {}, values, places, sideways)


def _draw_intervals(axes: Axes, error: dict[str, Any], values: np.ndarray, places: np.ndarray, sideways: bool) -> None:
    if error.get("array") is None:
        return
    more = numbers(error["array"])
    less = more if error.get("arrayminus") is None else numbers(error["arrayminus"])
    x, y = (values, places) if sideways else (places, values)
    bar = {"xerr" if sideways else "yerr": np.stack((less, more))}
    axes.errorbar(x, y, fmt="none", ecolor=error.get("color", INK), elinewidth=1.1, capsize=2.5, zorder=3, **bar)  # type: ignore[arg-type]


def draw_heat_map(axes: Axes, trace: dict[str, Any], colours: Colours) -> None:
    """Draw a rectangle per cell, white without a value, with its text if any."""
    x, y = numbers(trace["x"]), numbers(trace["y"])
    z = np.array([[np.nan if value is None else value for value in row] for row in trace["z"]], dtype=float)
    look: dict[str, Any] = {"cmap": colours.ramp, "norm": colours.norm, "zorder": 1}
    # An SVG has a heat map as an image: a shape per cell makes it megabytes.
    axes.pcolormesh(_edges(x), _edges(y), np.ma.masked_invalid(z), rasterized=True, **look)
    texts = trace.get("text")
    if texts is None:
        return
    size = trace.get("textfont", {}).get("size", 11) * POINTS
    for row, line in enumerate(texts):
        for column, shown in enumerate(line):
            if np.isnan(z[row, column]):
                continue
            red, green, blue = to_rgb(colours.ramp(colours.norm(z[row, column])))
            light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
            ink = INK if light else "white"
            axes.text(x[column], y[row], text(shown), ha="center", va="center", size=size, color=ink, zorder=3)


def _edges(centres: np.ndarray) -> np.ndarray:
    """Edges of the cells around ``centres``: half way between neighbours."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    between = (centres[1:] + centres[:-1]) / 2
    return np.array([2 * centres[0] - between[0], *between, 2 * centres[-1] - between[-1]])


def numbers(values: Any) -> np.ndarray:
    """float64, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
