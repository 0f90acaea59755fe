"""What the pictures share: colours, markers and dashes, ticks of log axes, room for labels.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color), without the yellow, which is lost on white;
markers and dashes tell lines apart in print.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib import font_manager, ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = (("-", "solid"), ("--", "dash"), (":", "dot"), ("-.", "dashdot"))
MARKERS = (
    *(("o", "circle"), ("s", "square"), ("^", "triangle-up"), ("D", "diamond"), ("v", "triangle-down")),
    *(("P", "cross"), ("X", "x"), ("<", "triangle-left"), (">", "triangle-right"), ("*", "star")),
)
INK, FAINT, GRID, RULE, PAPER = "#222222", "#707070", "#e4e4e4", "#999999", "white"
DARK = {
    INK: "#e6e6e6",
    FAINT: "#a6a6a6",
    GRID: "#3d3d3d",
    RULE: "#7a7a7a",
    PAPER: "#181818",
    "#000000": "#ffffff",
    "#0072B2": "#3d9bd6",
}
"""Colours of pages, and what they are where the reader's screen is dark. The others are bright enough for both."""
TIMES = "\N{MULTIPLICATION SIGN}"


class LineStyle(NamedTuple):
    """One line's looks; dash and marker as (matplotlib's name, Plotly's name)."""

    colour: str
    dash: tuple[str, str]
    marker: tuple[str, str]


def line_style(index: int) -> LineStyle:
    """Looks of line ``index``: the first seven differ in colour, the first 140 in something.

    Neighbours differ in dash as well, so that a line shows where another covers it.
    """
    return LineStyle(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


def matplotlib_style(style: LineStyle) -> dict[str, Any]:
    """Keywords of a matplotlib line."""
    return {
        "color": style.colour,
        "linestyle": style.dash[0],
        "marker": style.marker[0],
        "lw": 1.8,
        "ms": 6,
        "mec": "white",
        "mew": 0.7,
    }


def scale_values(axes: Axes, low: float, high: float, most: int = 10) -> None:
    """Log y axis from ``low`` to ``high`` with at most ``most`` round numbers on it."""
    axes.set_autoscaley_on(False)  # its margins overflow next to the largest floats
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(ticker.FixedLocator(value_ticks(low, high, most)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: tick_text(value)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def apart(wanted: Sequence[float], gap: float, top: float = 1.0) -> list[float]:
    """Positions nearest to ``wanted`` that are ``gap`` apart and, where they fit, within 0 to ``top``."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Taking rank x gap off turns "apart" into "not descending": isotonic regression by pooling.
    pools: list[list[float]] = []
    for rank, index in enumerate(order):
        pools.append([wanted[index] - rank * gap])
        while len(pools) > 1 and fmean(pools[-2]) >= fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    level = [fmean(pool) for pool in pools for _ in pool]
    room = max(0.0, top - (len(wanted) - 1) * gap)
    placed = {index: min(max(level[rank], 0.0), room) + rank * gap for rank, index in enumerate(order)}
    return [placed[index] for index in range(len(wanted))]


def value_ticks(low: float, high: float, most: int = 10) -> list[float]:
    """At most ``most`` round values between ``low`` and ``high``, the densest of several ladders."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ladders: list[list[float]] = [
        [step * 10.0**power for power in range(first, last) for step in steps]
        for steps in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
    ]
    every = max(1, math.ceil((last - first) / (most - 1)))
    ladders.append([10.0**power for power in range(first, last + 1, every)])
    inside = [[value for value in ladder if low <= value <= high] for ladder in ladders]
    if len(inside[0]) < 4 <= most:  # a narrow range: linear steps
        linear = ticker.MaxNLocator(min(6, most), steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        return [float(value) for value in linear if low <= value <= high]
    return next((ticks for ticks in inside if len(ticks) <= most), inside[-1])


def tick_text(value: float) -> str:
    """7.5, 1,000, 10⁶: as short as it can be read."""
    power = math.log10(value)
    if value < 1e6:
        return f"{value:,.10g}"
    exponent = str(math.floor(power + 1e-9)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = value / 10.0 ** math.floor(power + 1e-9)
    return f"10{exponent}" if abs(mantissa - 1) < 1e-6 else f"{mantissa:.6g}·10{exponent}"


def shortened(text: str, most: int) -> str:
    """``text`` with its end cut to an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def drawable(text: str) -> str:
    """``text`` with what the font has no glyph for (matplotlib would warn and draw boxes) as ``?``."""
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return "".join(char if char.isprintable() and font.get_char_index(ord(char)) else "?" for char in text)


def plain_axes(figure: Figure, box: tuple[float, float, float, float]) -> Axes:
    """Axes at (left, bottom, width, height) of the figure: no frame on top and right, faint grid."""
    axes = figure.add_axes(box)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(colors=INK, which="both", labelsize=9, color=RULE)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    return axes


def write_titles(figure: Figure, title: str, subtitle: str) -> None:
    """Two lines at the top left, cut to the figure's width."""
    width, height = figure.get_size_inches()
    for text, top, size, weight, per_inch in ((title, 0.3, 13, "bold", 8.2), (subtitle, 0.56, 9, "normal", 13.5)):
        text = drawable(shortened(text, int(width * per_inch)))
        at = (0.2 / width, 1 - top / height)
        figure.text(*at, text, size=size, weight=weight, color=INK, va="center", parse_math=False)


def png(figure: Figure) -> bytes:
    """The figure through Agg, which needs no display."""
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()
