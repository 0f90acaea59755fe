"""Sinusoids of positions, and the rotation of a query by its position: the same frequencies, drawn as two ideas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from service.figures.drawing.axes import linear_axis
from service.figures.drawing.charts import BOTTOM, NOTE, TITLE_Y
from service.figures.drawing.curves import Curve, curve_traces
from service.figures.drawing.panels import grid
from service.figures.drawing.style import COLOURS, GRID, line_style
from service.figures.encodings.frequencies import wavelength
from service.figures.encodings.positions import HEIGHT

DIVERGING = ((0.0, COLOURS[0]), (0.5, "#f4f4f4"), (1.0, COLOURS[1]))
"""Colours from -1 to 1."""
APART = 3.0
"""Distance between two waves, in amplitudes: their names are between them."""
EDGE = 16
"""Margin below panels without axes, pixels."""
NARROWEST = 0.12
"""Radians between two labels of a rotation."""


def sinusoids(inv_freq: Sequence[float], length: int) -> torch.Tensor:
    """Position vectors float64 [length, 2 x pairs]: sin and cos of position x ``inv_freq``, alternating.

    Vaswani et al., arXiv:1706.03762, section 3.5.
    """
    angles = torch.arange(length).double()[:, None] * torch.tensor(inv_freq, dtype=torch.float64)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def sinusoids_figure(inv_freq: Sequence[float], length: int, pairs: Sequence[int]) -> go.Figure:
    """All dimensions of the position vectors as a heat map, and the sines of some ``pairs`` as waves."""
    table = sinusoids(inv_freq, length)
    texts = "Sinusoidal position vectors", f"{2 * len(inv_freq)} dimensions: sine and cosine of {len(inv_freq)} pairs"
    titles = ["one column per position", "the sines of some pairs"]
    figure = grid(titles, texts, columns=2, panel_height=HEIGHT, right=110, spacing=0.08)
    places = list(range(length))
    cells = go.Heatmap(x=places, y=list(range(table.shape[1])), z=table.T.tolist(), coloraxis="coloraxis")
    figure.add_trace(cells, row=1, col=1)
    figure.update_yaxes(**linear_axis("dimension", table.shape[1] - 0.5, -0.5), showgrid=False, row=1, col=1)
    for index, pair in enumerate(pairs):
        height = -APART * index
        curve = Curve(f"pair {pair}", places, (table[:, 2 * pair] + height).tolist())
        (line,) = curve_traces(curve, line_style(index), str(index))
        line.update(mode="lines", line={"dash": "solid"}, showlegend=False)
        figure.add_trace(line, row=1, col=2)
    heights = [-APART * index for index in range(len(pairs))]
    for pair, height in zip(pairs, heights, strict=True):
        name = {"text": f"pair {pair}: {turn(inv_freq[pair])}", **NOTE, "yshift": 1}
        figure.add_annotation(x=-0.5, y=height + 1, xanchor="left", yanchor="bottom", row=1, col=2, **name)
    y = linear_axis("sine", heights[-1] - APART / 2, APART - 1, ticks=heights) | {"ticktext": [""] * len(pairs)}
    figure.update_yaxes(**y, row=1, col=2)
    figure.update_xaxes(**linear_axis("position", -0.5, length - 0.5), showgrid=False)
    bar = {"title": {"text": "value"}, "tickvals": [-1, 0, 1], "ticktext": ["-1", "0", "1"]}
    figure.update_layout(coloraxis={"colorscale": DIVERGING, "cmin": -1, "cmax": 1, "colorbar": bar})
    return figure


def rotation_figure(inv_freq: Sequence[float], tokens: int, pairs: Sequence[int]) -> go.Figure:
    """One query at the positions 0 .. ``tokens`` - 1, seen in the planes of some rotary ``pairs``."""
    titles = [f"pair {pair}: {turn(inv_freq[pair])}" for pair in pairs]
    texts = "Rotation of one query", f"its two coordinates in each pair at the positions 0 to {tokens - 1}"
    figure = grid(titles, texts, columns=len(pairs), panel_height=300, right=24)
    height = figure.layout.height - BOTTOM + EDGE  # no axes below the panels
    figure.update_layout(height=height, margin_b=EDGE, title_y=1 - TITLE_Y / height)
    circle = [math.tau * step / 120 for step in range(121)]
    names: list[dict[str, Any]] = []
    for column, pair in enumerate(pairs, start=1):
        panel = {"row": 1, "col": column}
        x, y = ([wave(angle) for angle in circle] for wave in (math.cos, math.sin))
        figure.add_scatter(x=x, y=y, mode="lines", line={"color": GRID, "width": 1.5}, showlegend=False, **panel)
        angles = [position * inv_freq[pair] for position in range(tokens)]
        for turned, colour in ((angles[1:], COLOURS[0]), (angles[:1], COLOURS[1])):
            figure.add_scatter(
                x=[x for angle in turned for x in (0, math.cos(angle), None)],
                y=[y for angle in turned for y in (0, math.sin(angle), None)],
                mode="lines+markers",
                line={"color": colour, "width": 1.5},
                marker={"size": 6, "color": colour},
                showlegend=False,
                **panel,
            )
        axes = {"xref": "x" if column == 1 else f"x{column}", "yref": "y" if column == 1 else f"y{column}"}
        names += [
            {"x": 1.14 * math.cos(angles[at]), "y": 1.14 * math.sin(angles[at]), "text": str(at), **NOTE, **axes}
            for at in _apart(angles)
        ]
        plane = {"range": [-1.25, 1.25], "visible": False, "showgrid": False}
        figure.update_xaxes(**plane, **panel)
        figure.update_yaxes(**plane, scaleanchor="x" if column == 1 else f"x{column}", **panel)
    figure.update_layout(annotations=[*figure.layout.annotations, *names])  # one by one takes several times as long
    return figure


def _apart(angles: Sequence[float]) -> list[int]:
    """Indices of angles whose labels on the circle do not overlap those before them."""
    found: list[int] = []
    for index, angle in enumerate(angles):
        if all(abs(math.remainder(angle - angles[other], math.tau)) > NARROWEST for other in found):
            found.append(index)
    return found


def turn(inv_freq: float) -> str:
    """The length of a turn in words."""
    tokens = wavelength(inv_freq)
    return "no rotation" if tokens is None else f"a turn in {tokens:,.1f} tokens"
