"""Horizontal bars with their intervals."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from service.figures.drawing.axes import category_axis
from service.figures.drawing.charts import BOTTOM, TITLE_Y, TOP, error_bars, labels, room_for
from service.figures.drawing.style import COLOURS, INK

HATCHES = ("", "/", "x", ".", "\\", "-", "|", "+")
WHISKER = {"#000000": "#7f7f7f"}
"""Colours of whiskers by those of bars, on which they lie in part; ink on the others."""
ROW = 34
"""Pixels from one bar to the next."""
WIDTH = 0.62
"""Of a bar, as a share of its row."""


@dataclass(frozen=True)
class Bar:
    """One bar: its value (None: no bar), the text beside it, its interval.

    ``look`` is the index of the colour and hatch; ``best`` puts a star before the name.
    """

    name: str
    value: float | None
    text: str
    look: int
    interval: tuple[float, float] | None = None
    best: bool = False


def add_bars(figure: go.Figure, bars: Sequence[Bar], axis: dict[str, Any]) -> None:
    """Add bars from the top, in the colours of the lines, with hatches for print. Texts are right of the intervals."""
    texts = labels(bar.name for bar in bars)
    names = [f"★ {texts[bar.name]}" if bar.best else texts[bar.name] for bar in bars]
    for index, bar in enumerate(bars):
        name, colour = texts[bar.name], COLOURS[bar.look % len(COLOURS)]
        whisker = None
        if bar.value is not None and bar.interval is not None:
            low, high = bar.interval
            whisker = error_bars([bar.value], [low], [high], WHISKER.get(colour, INK))
        figure.add_bar(
            x=[bar.value],
            y=[index],
            orientation="h",
            width=WIDTH,
            name=name,
            hovertemplate=f"{name}: {html.escape(bar.text)}<extra></extra>",
            marker={
                "color": colour,
                "pattern": {
                    "shape": HATCHES[bar.look % len(HATCHES)],
                    "fillmode": "overlay",
                    "fgcolor": "white",
                    "solidity": 0.15,
                },
            },
            error_x=whisker,
            showlegend=False,
        )
        figure.add_annotation(
            x=1, xref="paper", xanchor="left", xshift=8, y=index, yref="y", text=html.escape(bar.text), showarrow=False
        )
    height = TOP + BOTTOM + ROW * len(bars) + 12
    figure.update_layout(
        barmode="overlay",
        xaxis=axis,
        yaxis={**category_axis("", names, reverse=True), "showgrid": False, "ticklabelstandoff": 6},
        margin={"l": room_for(names, 20), "r": room_for([bar.text for bar in bars], 28)},
        height=height,
        title_y=1 - TITLE_Y / height,
    )
