"""Pictures of a search: the loss by generation, and the factors of each pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from service.evaluation.results import Row, name_of
from service.evaluation.search.results import SearchResult
from service.figures.drawing.axes import linear_axis
from service.figures.drawing.charts import new_figure, note
from service.figures.drawing.curves import Curve, add_curves
from service.figures.looks import looks
from service.figures.picture import Picture

MOST_TICKS = 12
SPREAD = 10
"""The axis reaches this many times the gap from the best loss to the first one, or the next encoding."""


def search_pictures(result: SearchResult) -> Iterator[Picture]:
    """Loss by generation, then factors by pair."""
    yield loss_picture(result)
    yield factor_picture(result)


def loss_picture(result: SearchResult) -> Picture:
    """The least loss up to each generation, with the losses of the compared encodings as level lines."""
    title = f"Loss of the search at {result.target_length:,} tokens: {result.model}"
    numbers = list(range(1, len(result.generations) + 1))
    found, *others = result.methods
    curves = [
        *(Curve(name_of(method, result), numbers, [method.search_loss] * len(numbers)) for method in others),
        Curve(name_of(found, result), numbers, [generation.best for generation in result.generations]),
    ]
    low, high = _ends(curves[-1].known, [method.search_loss for method in others])
    figure = new_figure(title, f"mean of the last half of {result.windows} windows, which the search read")
    x = linear_axis("generation", 0.5, len(numbers) + 0.5, ticks=_ticks(numbers))
    figure.update_layout(xaxis=x, yaxis=linear_axis("loss, nats", low, high))
    add_curves(figure, curves, one="there is one generation", end="{:.4f}".format, looks=_looks(result))
    beyond = [curve.name for curve in curves if min(curve.known) > high]
    if beyond:
        note(figure, f"above the axis: {', '.join(beyond)}")
    rows: list[Row] = [
        {"method": curve.name, "generation": number, "loss": loss}
        for curve in curves
        for number, loss in zip(curve.x, curve.known, strict=True)
    ]
    caption = "The search chooses by these windows, so its loss looks better here than on held-out ones: see the table."
    return Picture("loss", title, figure, rows, caption)


def factor_picture(result: SearchResult) -> Picture:
    """The factor of each pair: of the search, and of the compared encodings that have one."""
    title = f"Factors of each rotary pair at {result.target_length:,} tokens: {result.model}"
    found, *others = result.methods
    named = [(name_of(method, result), method.factors) for method in (*others, found)]
    curves = [Curve(name, list(range(len(factors))), factors) for name, factors in named if factors is not None]
    most = max(value for curve in curves for value in curve.known)
    figure = new_figure(title, "wavelength, divided by that of plain RoPE; pair 0 is the fastest")
    last = len(found.factors or ()) - 1
    x = linear_axis("rotary pair, fastest first", -0.5, last + 0.5, ticks=_ticks(range(last + 1)))
    figure.update_layout(xaxis=x, yaxis=linear_axis("factor", 0, 1.05 * most))
    add_curves(figure, curves, one="there is one pair", looks=_looks(result))
    rows: list[Row] = [
        {"method": curve.name, "pair": pair, "factor": factor}
        for curve in curves
        for pair, factor in zip(curve.x, curve.known, strict=True)
    ]
    caption = (
        f"The trained length is {result.trained_length:,} tokens. A factor of target / trained length interpolates a "
        "pair in full, a factor of 1 leaves it as it was trained. LongRoPE's never fall from a pair to the next."
    )
    return Picture("factors", title, figure, rows, caption)


def _looks(result: SearchResult) -> dict[str, int]:
    """The compared encodings look as in other figures of the same methods; the search has the next look."""
    found, *others = result.names()
    known = looks(others)
    return {**known, found: len(known)}


def _ticks(numbers: Sequence[int]) -> list[int]:
    return list(numbers[:: -(-len(numbers) // MOST_TICKS)])


def _ends(found: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis, with a margin. Losses far above the search leave it, or its course would be level."""
    low = min(*found, *others)
    reach = SPREAD * (max(found[0], min(others)) - low)
    high = max(value for value in (*found, *others) if value <= low + reach)
    margin = 0.1 * (high - low) or 0.01
    return low - margin, high + margin
