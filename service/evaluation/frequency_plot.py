"""Wavelengths of the rotary pairs before and after an encoding, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from service.evaluation.plot_style import (
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

Wavelengths = Sequence[Any]  # tokens, None without rotation


def frequency_png(pairs: Sequence[Mapping[str, Any]], trained_length: int, title: str) -> bytes:
    """``frequency_figure`` as PNG."""
    return png(frequency_figure(pairs, trained_length, title))


def frequency_figure(pairs: Sequence[Mapping[str, Any]], trained_length: int, title: str) -> Figure:
    """Wavelength of each rotary pair before and after, and by how much it was stretched.

    Each of ``pairs`` has ``pair``, ``wavelength_before`` and ``wavelength_after`` in tokens; None
    stands for no rotation.
    """
    figure = Figure(figsize=(8, 6), dpi=150, facecolor="white")
    write_titles(figure, title, f"each rotary pair; shaded: no full turn within the trained {trained_length:,} tokens")
    upper = plain_axes(figure, (0.11, 0.37, 0.85, 0.47))
    lower = plain_axes(figure, (0.11, 0.1, 0.85, 0.21))
    index = [row["pair"] for row in pairs]
    before, after = [row["wavelength_before"] for row in pairs], [row["wavelength_after"] for row in pairs]
    _draw_wavelengths(upper, index, before, after, trained_length)
    _draw_stretch(lower, index, before, after)
    for axes in (upper, lower):
        axes.set_xlim(index[0] - 0.5, index[-1] + 0.5)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return figure


def _draw_wavelengths(axes: Axes, index: list[int], before: Wavelengths, after: Wavelengths, trained: int) -> None:
    if None not in before:
        axes.plot(index, before, label="before", color="#b5b5b5", lw=5, solid_capstyle="round")
    if None not in after:
        axes.plot(index, after, label="after", **matplotlib_style(line_style(0)))
    known = [value for value in (*before, *after) if value is not None]
    scale_values(axes, min([*known, trained]) / 1.5, max([*known, trained]) * 1.5)
    axes.axhline(trained, color=FAINT, lw=1.2, dashes=(5, 3), zorder=1)
    axes.axhspan(trained, axes.get_ylim()[1], color="black", alpha=0.035, lw=0, zorder=0)
    axes.text(0.01, trained * 1.15, "trained length", transform=axes.get_yaxis_transform(), size=8, color=FAINT)
    axes.set_ylabel("wavelength, tokens", color=INK)
    if known:
        axes.legend(frameon=False, loc="lower right", fontsize=9)


def _draw_stretch(axes: Axes, index: list[int], before: Wavelengths, after: Wavelengths) -> None:
    axes.set_ylabel("stretch", color=INK)
    axes.set_xlabel("rotary pair, fastest first", color=INK)
    stretch = [b / a for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if len(stretch) < len(index):
        note = "this encoding rotates nothing" if None in after else "the checkpoint rotates nothing"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", color=FAINT)
        axes.set_yticks([])
        return
    axes.plot(index, stretch, **matplotlib_style(line_style(0)))
    least, most = min([*stretch, 1.0]), max([*stretch, 1.0])
    scale_values(axes, least / 1.15, most * 1.15, most=5)
    if 2 <= most / least <= 64:
        axes.yaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
    axes.axhline(1, color=FAINT, lw=0.8, zorder=1)
