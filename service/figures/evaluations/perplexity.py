"""Perplexity against context length."""

from __future__ import annotations

import math
from collections.abc import Iterator

from service.evaluation.formatting import counted, short_number, spaced
from service.evaluation.perplexity.results import MethodResult, PerplexityResult
from service.evaluation.results import documents_text, name_of
from service.evaluation.statistics.nll import LengthResult
from service.evaluation.statistics.separation import ratio_note
from service.figures.drawing.axes import beyond, token_axis, value_axis
from service.figures.drawing.charts import mark_trained, new_figure, note
from service.figures.drawing.curves import INTERVALS, Curve, add_curves
from service.figures.drawing.style import TIMES
from service.figures.evaluations.nll import nll_by_position
from service.figures.looks import looks
from service.figures.picture import Picture


def perplexity_pictures(result: PerplexityResult) -> Iterator[Picture]:
    """The curve by context length, then NLL by position."""
    yield perplexity_picture(result)
    by_position = nll_by_position(result)
    if by_position is not None:
        yield by_position


def perplexity_picture(result: PerplexityResult) -> Picture:
    """Both axes logarithmic; a line and its 95 % interval per method, a mark at the trained length."""
    title = f"Perplexity by context length: {result.model}"
    curves = [_curve(method, result) for method in result.methods]
    known = [curve.known for curve in curves]
    y = value_axis("perplexity", known, [curve.ends for curve in curves])
    subtitle = f"{result.protocol_note()} protocol · {documents_text(result.documents)}{beyond(known, y)}"
    figure = new_figure(title, subtitle)
    x = token_axis("context length, tokens", result.lengths, result.trained_length)
    ticks = _length_ticks(result)
    x |= {"tickvals": ticks, "ticktext": [_tick_text(length, result.trained_length) for length in ticks]}
    figure.update_layout(xaxis=x, yaxis=y, showlegend=True, legend_title_text=f"at {result.lengths[-1]:,} tokens")
    mark_trained(figure, result.trained_length, x)
    if add_curves(figure, curves, end=short_number, looks=looks(result.names())):
        note(figure, result.interval_note())
    by_ratio = ratio_note(result.scores())
    caption = (
        f"Lower is better. {INTERVALS}{by_ratio and f' {by_ratio}.'} Right of the trained length the model reads "
        "positions that it never saw in training."
    )
    caption = " ".join([caption, *result.cautions()])
    return Picture("perplexity", title, figure, result.rows(), caption)


def _curve(method: MethodResult, result: PerplexityResult) -> Curve:
    points = [(at.length, at.perplexity, at.interval, _hover(at)) for at in method.lengths]
    return Curve.through(name_of(method, result), points, short_number)


def _hover(at: LengthResult) -> str:
    return f"{at.bits_per_byte:.4f} bits per byte<br>{at.tokens_scored:,} tokens in {counted(at.windows, 'window')}"


def _length_ticks(result: PerplexityResult) -> list[int]:
    """Doublings of the trained length where at least three were measured, any lengths otherwise."""
    trained = result.trained_length
    doublings = [length for length in result.lengths if math.log2(length / trained).is_integer()]
    return spaced(
        doublings if len(doublings) >= 3 else result.lengths, trained, 12 if result.lengths[-1] < 100_000 else 9
    )


def _tick_text(length: int, trained: int) -> str:
    """The length, and below it the multiple of the trained length where it is a whole one."""
    return f"{length:,}<br>{length // trained}{TIMES}" if length % trained == 0 else f"{length:,}"
