"""Colours, markers and dashes of all pictures, and round ticks of their axes.

The colours are Okabe and Ito's (jfly.uni-koeln.de/color), without the yellow, which is too light on white.
Markers and dashes distinguish lines in print.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = (
    *("circle", "square", "triangle-up", "diamond", "triangle-down"),
    *("cross", "x", "triangle-left", "triangle-right", "star"),
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
"""Colours of light pages and their replacements on dark ones. The other colours are readable on both."""
ENCODING = re.compile(r"(\w+)\((.+)\)(.*)", re.DOTALL)
"""A label: method, parameters, and the model where it is another."""
PARAMETER = re.compile(r"[^(),\s]+")
TIMES = "\N{MULTIPLICATION SIGN}"


class LineStyle(NamedTuple):
    """Colour, dash and marker of a line, by Plotly's names."""

    colour: str
    dash: str
    marker: str


def line_style(index: int) -> LineStyle:
    """Style of line ``index``: the first seven differ in colour, the first 140 in colour, dash or marker.

    Neighbours differ in dash too, so that a line stays visible under another one.
    """
    return LineStyle(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


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
        return linear_ticks(low, high, min(6, most))
    return next((ticks for ticks in inside if len(ticks) <= most), inside[-1])


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of a round step between ``low`` and ``high``: at least two, at most ``most`` + 1."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(times * power for times in (1, 2, 2.5, 5, 10, 20) if times * power >= least)
    # The product has rounding errors beyond the digits of the step.
    digits = 2 - math.floor(math.log10(step))
    multiples = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [value for value in (round(step * times, digits) for times in multiples) if low <= value <= high]


def tick_text(value: float) -> str:
    """A short number: 7.5, 1,000, 10⁶."""
    power = math.log10(value)
    if value < 1e6:
        return f"{value:,.10g}"
    exponent = str(math.floor(power + 1e-9)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = value / 10.0 ** math.floor(power + 1e-9)
    return f"10{exponent}" if abs(mantissa - 1) < 1e-6 else f"{mantissa:.6g}·10{exponent}"


def shortened(text: str, most: int) -> str:
    """``text`` cut to ``most`` characters, the last one an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def different(names: Iterable[str], most: int) -> dict[str, str]:
    """Every name in at most ``most`` characters, so that different names stay different.

    Encodings of one method leave out the parameters that all have. Other names that begin alike show the part that
    differs instead of their middle. A number follows if that is alike too.
    """
    ordered, alike = sorted(set(names)), dict[str, list[str]]()
    short = {name: name for name in ordered if len(name) <= most}
    texts = _without_shared([name for name in ordered if name not in short])
    for name in sorted(texts, key=lambda name: (texts[name], name)):
        alike.setdefault(shortened(texts[name], most), []).append(name)
    for text, group in alike.items():
        first, last = texts[group[0]], texts[group[-1]]  # sorted: no two of the others differ before these do
        differs = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        for name in group:
            cut = text if len(group) == 1 else _around(texts[name], differs, most)
            short[name] = _unused(cut, most, short.values())
    return short


def _without_shared(names: Sequence[str]) -> dict[str, str]:
    """The text of each name: that of an encoding lacks the parameters of all names of its method."""
    found = {name: label for name in names if (label := ENCODING.fullmatch(name))}
    parameters = {name: PARAMETER.findall(label[2]) for name, label in found.items()}
    texts = {name: name for name in names}
    for name, label in found.items():
        others = [parameters[other] for other, its in found.items() if its[1] == label[1]]
        shared = set.intersection(*map(set, others))
        if shared and len(others) > 1:
            own = ", ".join(part for part in parameters[name] if part not in shared)
            texts[name] = f"{label[1]}({f'… {own}'.rstrip()}){label[3]}"
    return texts


def _around(name: str, at: int, most: int) -> str:
    """The beginning of ``name``, and its text from the word at ``at`` on."""
    begin = name[:at].rfind(" ") + 1
    head, room = name[: most // 3] + "…", most - most // 3 - 1
    return head + shortened(name[begin if at - begin < room // 2 else at :], room)


def _unused(text: str, most: int, used: Collection[str]) -> str:
    """``text``, numbered where it is used already."""
    numbered = (f"{shortened(text, most - 4)} {number}" for number in range(2, 1000))
    return next(one for one in (text, *numbered) if one not in used)
