"""Wavelengths of the rotary pairs before and after an encoding, and what else it changes, as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from patches import Recipe
from service.figures.drawing.style import (
    FAINT,
    INK,
    TIMES,
    line_style,
    matplotlib_style,
    plain_axes,
    png,
    scale_values,
    write_titles,
)
from service.figures.encodings.positions import draw_bias, draw_distance

TIMES_LONGER = 4
MOST_TOKENS = 1 << 20
"""Drawn for at least so many trained lengths, and for so many tokens at most."""


def frequency_png(
    pairs: Sequence[Mapping[str, Any]],
    trained_length: int,
    title: str,
    recipe: Recipe | None = None,
    length: int | None = None,
) -> bytes:
    """``frequency_figure`` as PNG."""
    return png(frequency_figure(pairs, trained_length, title, recipe, length))


def frequency_figure(
    pairs: Sequence[Mapping[str, Any]],
    trained_length: int,
    title: str,
    recipe: Recipe | None = None,
    length: int | None = None,
) -> Figure:
    """Wavelength of each rotary pair before and after; below, what else ``recipe`` changes, or the stretch.

    Each of ``pairs`` has ``pair``, ``wavelength_before`` and ``wavelength_after`` in tokens; None
    stands for no rotation. ``length`` is how many tokens positions and biases are drawn for.
    """
    figure = Figure(figsize=(8, 6), dpi=150, facecolor="white")
    write_titles(figure, title, f"each rotary pair; shaded: no full turn within the trained {trained_length:,} tokens")
    upper = plain_axes(figure, (0.11, 0.39, 0.85, 0.45))
    lower = plain_axes(figure, (0.11, 0.1, 0.85, 0.19))
    index = [row["pair"] for row in pairs]
    before, after = ([_or_nan(row[f"wavelength_{when}"]) for row in pairs] for when in ("before", "after"))
    _draw_wavelengths(upper, index, before, after, trained_length)
    drawn = max(length or 0, TIMES_LONGER * trained_length)
    _scale_pairs(upper, index)
    if recipe is not None and recipe.score_bias is not None:
        draw_bias(lower, recipe, min(drawn, MOST_TOKENS), trained_length)
    elif recipe is not None and recipe.bands != Recipe(None).bands:
        draw_distance(lower, recipe, min(drawn, MOST_TOKENS), trained_length)
    else:
        _draw_stretch(lower, index, before, after)
        _scale_pairs(lower, index)
        upper.set_xlabel("")
    return figure


def _draw_wavelengths(axes: Axes, index: list[int], before: list[float], after: list[float], trained: int) -> None:
    for label, values, style in (
        ("before", before, {"color": "#b5b5b5", "lw": 5, "solid_capstyle": "round"}),
        ("after", after, matplotlib_style(line_style(0))),
    ):
        if not all(map(math.isnan, values)):
            axes.plot(index, values, label=label, **style)
    known = [value for value in (*before, *after) if not math.isnan(value)]
    scale_values(axes, min([*known, trained]) / 1.5, max([*known, trained]) * 1.5)
    axes.axhline(trained, color=FAINT, lw=1.2, dashes=(5, 3), zorder=1)
    axes.axhspan(trained, axes.get_ylim()[1], color="black", alpha=0.035, lw=0, zorder=0)
    axes.text(0.01, trained * 1.15, "trained length", transform=axes.get_yaxis_transform(), size=8, color=FAINT)
    axes.set_ylabel("wavelength, tokens", color=INK)
    still = sum(map(math.isnan, after))
    if known and 0 < still < len(index):
        note = f"{still} of {len(index)} pairs do not rotate"
        axes.text(0.99, 1.02, note, transform=axes.transAxes, ha="right", size=8, color=FAINT)
    if known:
        axes.legend(frameon=False, loc="lower right", fontsize=9)


def _draw_stretch(axes: Axes, index: list[int], before: list[float], after: list[float]) -> None:
    axes.set_ylabel("stretch", color=INK)
    stretch = [b / a for a, b in zip(before, after, strict=True)]
    known = [value for value in stretch if not math.isnan(value)]
    if not known:
        note = "this encoding rotates nothing" if all(map(math.isnan, after)) else "the checkpoint rotates nothing"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set_yticks([])
        return
    axes.plot(index, stretch, **matplotlib_style(line_style(0)))
    least, most = min([*known, 1.0]), max([*known, 1.0])
    scale_values(axes, least / 1.15, most * 1.15, most=5)
    if 2 <= most / least <= 64:
        axes.yaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
    axes.axhline(1, color=FAINT, lw=0.8, zorder=1)


def _scale_pairs(axes: Axes, index: list[int]) -> None:
    axes.set_xlim(index[0] - 0.5, index[-1] + 0.5)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_xlabel("rotary pair, fastest first", color=INK)


def wavelength(inv_freq: float) -> float | None:
    """Tokens in which a pair turns once; None where it does not rotate."""
    return math.tau / inv_freq if inv_freq else None


def _or_nan(wavelength: float | None) -> float:
    """NaN draws nothing: a pair that does not rotate has no wavelength."""
    return math.nan if wavelength is None else wavelength
