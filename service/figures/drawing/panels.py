"""Panels in a grid with the same axes, and heat maps in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, TypeVar

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from service.figures.drawing.axes import spread
from service.figures.drawing.charts import BOTTOM, GAP, TOP, labels, write_layout
from service.figures.drawing.style import INK

COLUMNS = 3
"""Panels side by side."""
TITLE_CHARS = {1: 100, 2: 50, 3: 30}
"""Characters in a line of a panel's title, by the number of columns."""
SEQUENTIAL = "Cividis"
WRITTEN = 8
"""Up to this many columns, cells have their numbers in them."""
MOST_CELLS = 40_000
"""Cells of all heat maps of a figure, at most: more are narrower than a pixel of most screens."""
Cell = TypeVar("Cell")
Axes = tuple[dict[str, Any], dict[str, Any]]
Column = TypeVar("Column")
Line = TypeVar("Line")


@dataclass(frozen=True)
class Panel:
    """A heat map: ``z`` [y, x], None for an empty cell; ``texts`` are written into its cells."""

    title: str
    x: Sequence[float]
    y: Sequence[float]
    z: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]] | None = None
    hover: Sequence[Sequence[str]] | None = None


def table_panel(
    title: str,
    table: Sequence[Sequence[Cell | None]],
    value: Callable[[Cell], float],
    text: Callable[[float], str],
    hover: Callable[[Cell], str],
) -> Panel:
    """A panel of the ``value`` of each cell of ``table`` [lines, columns]."""
    columns = len(table[0])
    z = [[None if cell is None else value(cell) for cell in line] for line in table]
    texts = [["" if number is None else text(number) for number in line] for line in z] if columns <= WRITTEN else None
    shown = [["" if cell is None else hover(cell) for cell in line] for line in table]
    return Panel(title, range(columns), range(len(table)), z, texts, shown)


def grid(
    titles: Sequence[str],
    texts: tuple[str, str],
    *,
    columns: int,
    panel_height: int,
    right: int,
    spacing: float = 0.05,
) -> go.Figure:
    """Empty panels under their ``titles``, row by row.

    ``texts`` are the figure's title and subtitle; ``spacing`` is the share of the width between two panels.
    """
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    texts_of = labels(titles)
    inner = lines * panel_height + (lines - 1) * GAP
    figure = make_subplots(
        rows=lines,
        cols=columns,
        subplot_titles=["<br>".join(wrap(texts_of[title], TITLE_CHARS[columns])) for title in titles],
        horizontal_spacing=spacing if columns > 1 else 0.0,
        vertical_spacing=GAP / inner if lines > 1 else 0.0,
    )
    write_layout(figure, *texts, height=inner + TOP + BOTTOM + 8, right=right)
    figure.update_annotations(font={"size": 13, "color": INK})
    return figure


def place(figure: go.Figure, index: int, count: int, columns: int, axes: Axes, **more: Any) -> dict[str, int]:
    """Write the axes of panel ``index`` of ``count``, titles only at the grid's edges; returns its row and column."""
    columns = min(columns, count)
    at = {"row": index // columns + 1, "col": index % columns + 1}
    nothing = {"text": ""}
    x, y = dict(axes[0]), dict(axes[1])
    x["title"] = x["title"] if index + columns >= count else nothing
    y["title"] = y["title"] if at["col"] == 1 else nothing
    figure.update_xaxes(**x, **more, **at)
    figure.update_yaxes(**y, **more, showticklabels=at["col"] == 1, **at)
    return at


def cells_drawn(columns: Sequence[Column], lines: Sequence[Line], panels: int) -> tuple[list[Column], list[Line]]:
    """The columns and lines that each of ``panels`` heat maps draws, at equal steps with both ends.

    The figure has at most ``MOST_CELLS`` cells, and at least 16 per panel.
    """
    most = max(MOST_CELLS // panels, 16)
    if len(columns) * len(lines) <= most:
        return list(columns), list(lines)
    wide = min(len(columns), max(math.isqrt(most), most // len(lines)))
    return spread(columns, wide), spread(lines, min(len(lines), most // wide))


def heat_maps(
    panels: Sequence[Panel],
    texts: tuple[str, str],
    axes: Axes,
    colours: dict[str, Any],
    *,
    panel_height: int = 250,
) -> go.Figure:
    """Panels with the same axes and one colour bar; ``colours`` is Plotly's colour axis."""
    figure = grid([panel.title for panel in panels], texts, columns=COLUMNS, panel_height=panel_height, right=110)
    for index, panel in enumerate(panels):
        at = place(figure, index, len(panels), COLUMNS, axes, showgrid=False)
        figure.add_trace(_heat_map(panel), **at)
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, **colours})
    return figure


def _heat_map(panel: Panel) -> go.Heatmap:
    texts = {} if panel.texts is None else {"text": panel.texts, "texttemplate": "%{text}", "textfont": {"size": 11}}
    hover = {} if panel.hover is None else {"customdata": panel.hover, "hovertemplate": "%{customdata}<extra></extra>"}
    return go.Heatmap(
        x=list(panel.x), y=list(panel.y), z=panel.z, coloraxis="coloraxis", hoverongaps=False, **texts, **hover
    )
