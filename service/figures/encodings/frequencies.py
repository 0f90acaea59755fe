"""Wavelengths of the rotary pairs before and after an encoding, and the other changes that it makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from patches import Recipe
from service.figures.drawing.axes import linear_axis, log_axis
from service.figures.drawing.charts import LEFT, NOTE, mark_trained_height, new_figure, note, write_layout
from service.figures.drawing.curves import Curve, add_curves, curve_traces
from service.figures.drawing.style import RULE, TIMES, line_style, value_ticks
from service.figures.encodings.positions import PLAIN, add_heads, add_last_token, bias_of, distance_figure

TIMES_LONGER = 4
MOST_TOKENS = 1 << 20
"""Pictures of distances and biases reach this many trained lengths, up to this many tokens."""
Pairs = Sequence[Mapping[str, Any]]


def encoding_figure(pairs: Pairs, trained_length: int, name: str, recipe: Recipe, length: int) -> go.Figure:
    """The changes that an encoding makes: its distances where it only moves positions, else ``frequency_figure``.

    ``pairs`` are as for ``frequency_figure``; distances and biases are drawn for ``length`` tokens, but for at least 4
    times the trained length.
    """
    drawn = min(max(length, TIMES_LONGER * trained_length), MOST_TOKENS)
    if recipe.moves and recipe.score_bias is None and not _changed(pairs):
        return distance_figure(recipe, drawn, trained_length, name)
    return frequency_figure(pairs, trained_length, f"{name} at {length:,} tokens", recipe, drawn)


def frequency_figure(
    pairs: Pairs, trained_length: int, title: str, recipe: Recipe | None = None, length: int = 0
) -> go.Figure:
    """Wavelength of each rotary pair before and after; below, the bias or the distances of ``recipe``, or the stretch.

    Each of ``pairs`` has ``pair``, ``wavelength_before`` and ``wavelength_after`` in tokens; None means no rotation.
    Distances and biases are drawn for ``length`` tokens.
    """
    figure = make_subplots(rows=2, cols=1, row_heights=[0.68, 0.32], vertical_spacing=0.15)
    write_layout(
        figure, title, "each rotary pair; shaded: no full turn within the trained length", height=640, right=124
    )
    figure.update_layout(margin_l=LEFT + 16, showlegend=True)
    index = [row["pair"] for row in pairs]
    before, after = ([row[f"wavelength_{when}"] for row in pairs] for when in ("before", "after"))
    x = linear_axis("rotary pair, fastest first", index[0] - 0.5, index[-1] + 0.5)
    _add_wavelengths(figure, index, before, after, trained_length)
    figure.update_xaxes(**x, row=1, col=1)
    if recipe is not None and recipe.score_bias is not None:
        add_heads(figure, *bias_of(recipe, length), trained_length, row=2, col=1)
    elif recipe is not None and recipe.moves:
        add_last_token(figure, recipe, length, trained_length, row=2, col=1)
    else:
        _add_stretch(figure, index, before, after)
        figure.update_xaxes(**x, row=2, col=1)
        figure.update_xaxes(title_text="", row=1, col=1)
    return figure


def wavelengths_figure(
    before: Sequence[float],
    after: Mapping[str, Sequence[float]],
    trained_length: int,
    looks: Mapping[str, int] | None = None,
) -> go.Figure:
    """Wavelength of each rotary pair before, in grey, and after each named encoding; all are ``inv_freq`` [pairs]."""
    index = list(range(len(before)))
    curves = [Curve(name, index, [wavelength(value) for value in inv_freq]) for name, inv_freq in after.items()]
    plain = [wavelength(value) for value in before]
    known = [value for value in (*plain, *(value for curve in curves for value in curve.y)) if value is not None]
    subtitle = "each rotary pair; grey: before; shaded: no full turn within the trained length"
    figure = new_figure("Wavelengths before and after", subtitle, left=LEFT + 16)
    y = log_axis("wavelength, tokens", min(known) / 1.5, max(known) * 1.5)
    figure.update_layout(xaxis=linear_axis("rotary pair, fastest first", -0.5, len(index) - 0.5), yaxis=y)
    figure.add_scatter(x=index, y=plain, mode="lines", line=PLAIN, name="before", showlegend=True)
    add_curves(figure, curves, looks=looks)
    _mark_trained(figure, [plain, *(curve.y for curve in curves)], trained_length, y)
    return figure


def _changed(pairs: Pairs) -> bool:
    return any(pair["wavelength_before"] != pair["wavelength_after"] for pair in pairs)


Wavelengths = Sequence[float | None]


def _mark_trained(
    figure: go.Figure, curves: Sequence[Wavelengths], trained_length: int, axis: dict[str, Any], **panel: int
) -> None:
    """Name the trained length where no curve is. Curves are below it at the left, and above it at the right."""
    pairs = len(curves[0])
    above = [next((at for at, value in enumerate(y) if value and value > trained_length), pairs) for y in curves]
    is_early = 2 * min(above) < pairs
    mark_trained_height(figure, trained_length, axis, right=is_early, below=is_early, **panel)


def _add_wavelengths(
    figure: go.Figure, index: list[int], before: Wavelengths, after: Wavelengths, trained_length: int
) -> None:
    figure.add_scatter(x=index, y=before, mode="lines", line=PLAIN, name="before", showlegend=any(before), row=1, col=1)
    (line,) = curve_traces(Curve("after", index, after), line_style(0), "")
    figure.add_trace(line.update(showlegend=any(after)), row=1, col=1)
    known = [value for value in (*before, *after, float(trained_length)) if value is not None]
    y = log_axis("wavelength, tokens", min(known) / 1.5, max(known) * 1.5)
    figure.update_yaxes(**y, row=1, col=1)
    _mark_trained(figure, [before, after], trained_length, y, row=1, col=1)
    still = sum(value is None for value in after)
    if 0 < still < len(index):
        note(figure, f"{still} of {len(index)} pairs do not rotate")


def _add_stretch(figure: go.Figure, index: list[int], before: Wavelengths, after: Wavelengths) -> None:
    stretch = [b / a if a and b else None for a, b in zip(before, after, strict=True)]
    figure.add_traces(curve_traces(Curve("stretch", index, stretch), line_style(0), ""), rows=2, cols=1)
    figure.data[-1].showlegend = False
    if not any(stretch):
        text = f"{'the checkpoint' if any(after) else 'this encoding'} rotates nothing"
        place = {"x": 0.5, "xref": "x2 domain", "y": 0.5, "yref": "y2 domain"}
        figure.add_annotation(text=text, **place, **NOTE)
        figure.update_yaxes(**linear_axis("stretch", 0, 1, ticks=[]), row=2, col=1)
        return
    known = [1.0, *(value for value in stretch if value is not None)]
    low, high = min(known) / 1.15, max(known) * 1.15
    doublings = [2.0**power for power in range(-16, 17) if low <= 2.0**power <= high]
    ticks = doublings if 2 < len(doublings) < 8 else value_ticks(low, high, 5)
    axis = log_axis("stretch", low, high, ticks=ticks) | {"ticktext": [f"{tick:g}{TIMES}" for tick in ticks]}
    figure.update_yaxes(**axis, row=2, col=1)
    figure.add_hline(y=1, line={"color": RULE, "width": 0.8}, row=2, col=1)


def wavelength(inv_freq: float) -> float | None:
    """Tokens in which a pair turns once; None where it does not rotate."""
    return math.tau / inv_freq if inv_freq else None
