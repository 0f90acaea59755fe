"""Perplexity against context length as a picture.

PNG through matplotlib's object interface, never pyplot, whose global state is not safe in a server;
HTML through Plotly with its script inside, so that a saved page works offline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from service.evaluation.formatting import short_number, spaced
from service.evaluation.perplexity.results import LengthResult, MethodResult, PerplexityResult
from service.evaluation.results import documents_text, name_of
from service.figures.axes import leave_room, log_axis, value_range
from service.figures.charts import counted, mark_trained, new_figure, note
from service.figures.curves import ALONE, INTERVALS, NOT_SHADED, SHADE, Curve, add_curves, interval_text
from service.figures.picture import Picture
from service.figures.style import (
    FAINT,
    INK,
    TIMES,
    LineStyle,
    apart,
    drawable,
    line_style,
    matplotlib_style,
    plain_axes,
    png,
    scale_values,
    shortened,
    write_titles,
)

LABEL_CHARS = 48
MARKED_POINTS = 12
AXES_WIDTH, LEFT, TOP, BOTTOM = 6.4, 0.95, 1.05, 0.62  # inches
LEADER, VALUE, SAMPLE, NAME = 0.22, 0.88, 0.95, 1.37  # inches right of the axes


def perplexity_png(result: PerplexityResult) -> bytes:
    """``perplexity_figure`` as PNG."""
    return png(perplexity_figure(result))


def perplexity_figure(result: PerplexityResult) -> Figure:
    """Both axes logarithmic; a line and its 95 % interval per method, a mark at the trained length."""
    labels = [drawable(shortened(name_of(method, result), LABEL_CHARS)) for method in result.methods]
    width = LEFT + AXES_WIDTH + NAME + 0.3 + 0.075 * max(map(len, labels))
    height = max(5.4, 0.2 * len(labels) + TOP + BOTTOM + 0.2)
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    low, high = _value_range(result)
    ends = [[_interval(at) for at in method.lengths] for method in result.methods]
    shaded = len(ends) == 1 or leave_room(ends, low, high, logarithmic=True)
    notes = [f"one length was measured: {ALONE}"] if len(result.lengths) == 1 else []
    notes += [result.interval_note() if shaded else NOT_SHADED, _subtitle(result, "▲ beyond the axis")]
    write_titles(figure, f"Perplexity by context length: {result.model}", " · ".join(notes))
    box = (LEFT / width, BOTTOM / height, AXES_WIDTH / width, 1 - (TOP + BOTTOM) / height)
    axes = plain_axes(figure, box)
    for index, method in enumerate(result.methods):
        _draw_method(axes, result, method, line_style(index), shaded)
    _scale_lengths(axes, result)
    scale_values(axes, low, high)
    axes.set_ylabel("perplexity", color=INK)
    _mark_off_scale(axes, result, high)
    _label_ends(axes, result, labels, height - TOP - BOTTOM)
    return figure


def _draw_method(axes: Axes, result: PerplexityResult, method: MethodResult, style: LineStyle, shaded: bool) -> None:
    lengths = [at.length for at in method.lengths]
    low, high = zip(*(_interval(at) for at in method.lengths), strict=True)
    marked = spaced(lengths, result.trained_length, MARKED_POINTS)
    if len(lengths) == 1:
        axes.vlines(lengths, low, high, color=style.colour, lw=1.2)
    elif shaded:
        axes.fill_between(lengths, low, high, color=style.colour, alpha=SHADE, lw=0)
    axes.plot(
        lengths,
        [at.perplexity for at in method.lengths],
        markevery=[lengths.index(length) for length in marked],
        **matplotlib_style(style),
    )


def _scale_lengths(axes: Axes, result: PerplexityResult) -> None:
    """Log2 axis with token counts below, and multiples of the trained length above."""
    low, high = _length_range(result)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    ticks = _length_ticks(result)
    axes.xaxis.set_major_locator(ticker.FixedLocator(ticks))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda length, _: f"{length:,.0f}"))
    axes.xaxis.set_minor_locator(ticker.FixedLocator([n for n in result.lengths if n not in ticks][:64]))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("context length, tokens", color=INK)

    def above(text: str, fraction: float, align: str) -> None:
        axes.text(fraction, 1.02, text, transform=axes.transAxes, ha=align, size=8, color=FAINT)

    trained = result.trained_length
    if not low < trained < high:
        note = f"trained length {trained:,}"
        above(*((f"← {note}", 0.0, "left") if trained <= low else (f"{note} →", 1.0, "right")))
        return
    axes.axvline(trained, color=FAINT, lw=1.2, dashes=(5, 3), zorder=1)
    axes.axvspan(trained, high, color="black", alpha=0.035, lw=0, zorder=0)
    octaves = math.log2(high / low)
    at = math.log2(trained / low) / octaves
    above(f"trained length {trained:,}", min(max(at, 0.05), 0.9), "center")
    for doubling in range(1, math.ceil(octaves)):
        fraction = at + doubling / octaves
        if at + 0.13 < fraction < 0.99 and (octaves < 14 or doubling % 2 == 0):
            above(f"{2**doubling:,}{TIMES}", fraction, "center")


def _mark_off_scale(axes: Axes, result: PerplexityResult, high: float) -> None:
    """A triangle at the upper edge for every point above it."""
    for index, method in enumerate(result.methods):
        above = [at.length for at in method.lengths if at.perplexity > high]
        marked = spaced(above, result.trained_length, MARKED_POINTS) if above else []
        style = {"marker": "^", "ms": 6, "ls": "", "mec": "white", "mew": 0.7, "clip_on": False}
        axes.plot(marked, [high] * len(marked), color=line_style(index).colour, zorder=5, **style)  # type: ignore[arg-type]


def _label_ends(axes: Axes, result: PerplexityResult, labels: Sequence[str], inches: float) -> None:
    """Right of the axes, level with each line's end where there is room: value, looks and name."""
    inch = 1 / AXES_WIDTH
    in_axes: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
    to_fraction = axes.transData + axes.transAxes.inverted()
    low, high = axes.get_ylim()
    points = [(m.lengths[-1].length, min(max(m.lengths[-1].perplexity, low), high)) for m in result.methods]
    ends = [to_fraction.transform(point) for point in points]
    heights = apart([float(end[1]) for end in ends], 0.19 / inches, top=0.975)
    header = f"at {result.lengths[-1]:,}"
    axes.text(1 + VALUE * inch, 1.02, header, transform=axes.transAxes, ha="right", size=8, color=FAINT)
    for index, (method, label, end, height) in enumerate(zip(result.methods, labels, ends, heights, strict=True)):
        style = line_style(index)
        leader = [float(end[0]), 1.0, 1 + LEADER * inch], [float(end[1]), float(end[1]), height]
        axes.add_line(Line2D(*leader, color=style.colour, lw=0.7, alpha=0.7, **in_axes))
        value = short_number(method.lengths[-1].perplexity)
        axes.text(1 + VALUE * inch, height, value, ha="right", va="center", size=9, color=INK, **in_axes)
        sample = [1 + (SAMPLE + shift) * inch for shift in (0.0, 0.17, 0.34)]
        axes.add_line(Line2D(sample, [height] * 3, markevery=[1], **matplotlib_style(style), **in_axes))
        axes.text(1 + NAME * inch, height, label, va="center", size=9, color=INK, parse_math=False, **in_axes)


def perplexity_html(result: PerplexityResult) -> str:
    """The same picture as one interactive page; Plotly's script is inside it, nothing else is loaded."""
    return perplexity_picture(result).html()


def perplexity_picture(result: PerplexityResult) -> Picture:
    """Perplexity by context length, as page, PNG and rows."""
    return Picture(
        name="perplexity",
        title=f"Perplexity by context length: {result.model}",
        figure=perplexity_chart(result),
        rows=result.rows(),
        caption=f"Lower is better. {INTERVALS} Right of the trained length the model reads positions that it never saw "
        "in training.",
        draw=lambda: perplexity_png(result),
    )


def perplexity_chart(result: PerplexityResult) -> go.Figure:
    """The same picture as a Plotly figure."""
    title = f"Perplexity by context length: {result.model}"
    figure = new_figure(title, _subtitle(result, "double click shows what is beyond the axis"))
    x = log_axis("context length, tokens", *_length_range(result), ticks=_length_ticks(result))
    figure.update_layout(xaxis=x, yaxis=log_axis("perplexity", *_value_range(result)))
    mark_trained(figure, result.trained_length, x)
    if add_curves(figure, [_curve(method, result) for method in result.methods]):
        note(figure, result.interval_note())
    return figure


def _curve(method: MethodResult, result: PerplexityResult) -> Curve:
    ends = [_interval(at) for at in method.lengths]
    return Curve(
        name=name_of(method, result),
        x=[at.length for at in method.lengths],
        y=[at.perplexity for at in method.lengths],
        low=[low for low, _ in ends],
        high=[high for _, high in ends],
        hover=[_hover(at) for at in method.lengths],
    )


def _hover(at: LengthResult) -> str:
    interval = f"{interval_text(at.interval, short_number)}<br>" if at.interval else ""
    return (
        f"{interval}{at.bits_per_byte:.4f} bits per byte<br>{at.tokens_scored:,} tokens in "
        f"{counted(at.windows, 'window')}"
    )


def _interval(at: LengthResult) -> tuple[float, float]:
    """Low and high; the value itself where there is no interval."""
    return (at.interval.low, at.interval.high) if at.interval else (at.perplexity, at.perplexity)


def _subtitle(result: PerplexityResult, cut_note: str) -> str:
    """Protocol, documents, and ``cut_note`` if something is cut off."""
    highest = max(at.perplexity for method in result.methods for at in method.lengths)
    cut = f"{cut_note} · " if highest > _value_range(result)[1] else ""
    return f"{cut}{result.protocol_note()} protocol · {documents_text(result.documents)}"


def _length_range(result: PerplexityResult) -> tuple[float, float]:
    """Ends of the length axis: the lengths, the trained length if it is near, and a margin."""
    trained, first, last = result.trained_length, result.lengths[0], result.lengths[-1]
    near = [trained] if first / 4 <= trained <= last * 4 else []
    low, high = min(first, *near, last), max(last, *near, first)
    margin = (high / low) ** 0.03 if high > low else 2**0.5
    return low / margin, high * margin


def _length_ticks(result: PerplexityResult) -> list[int]:
    """Doublings of the trained length where at least three were measured, any lengths otherwise."""
    trained = result.trained_length
    doublings = [length for length in result.lengths if math.log2(length / trained).is_integer()]
    return spaced(
        doublings if len(doublings) >= 3 else result.lengths, trained, 12 if result.lengths[-1] < 100_000 else 9
    )


def _value_range(result: PerplexityResult) -> tuple[float, float]:
    """Ends of the value axis: perplexities, blow-ups cut off, intervals up to a factor of two beyond."""
    curves = [[at.perplexity for at in method.lengths] for method in result.methods]
    return value_range(curves, [[_interval(at) for at in method.lengths] for method in result.methods])
