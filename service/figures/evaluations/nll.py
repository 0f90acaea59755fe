"""NLL of tokens by the length of their context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.probe.results import ProbeResult
from service.evaluation.results import documents_text, name_of
from service.evaluation.statistics.nll import PositionBucket
from service.figures.drawing.axes import linear_axis, log_axis, loss_axis
from service.figures.drawing.charts import mark_trained, new_figure
from service.figures.drawing.curves import Curve, add_curves
from service.figures.drawing.style import linear_ticks
from service.figures.looks import looks
from service.figures.picture import Picture, rows_of

FIRST = 8
"""Start of the bucket of no context on a logarithmic axis."""
MOST_TICKS = 9


def nll_by_position(result: PerplexityResult | ProbeResult) -> Picture | None:
    """Mean NLL in nats of the tokens in each bucket of context, in passes of the longest length.

    None for fewer than two buckets: one bucket is the mean of all tokens.
    """
    buckets = [(name_of(method, result), bucket) for method in result.methods for bucket in method.nll_by_position]
    edges = sorted({edge for _, bucket in buckets for edge in (bucket.start, bucket.stop)})
    if len(edges) < 3:
        return None
    title = f"NLL by position in passes of {result.lengths[-1]:,} tokens: {result.model}"
    width = result.position_bin
    bins = "" if width is None else f"means over {width:,} positions · "
    figure = new_figure(title, f"{bins}{documents_text(result.documents)}")
    x = _axis(edges, linear=width is not None)
    nll = [bucket.nll_mean for _, bucket in buckets]
    figure.update_layout(xaxis=x, yaxis=loss_axis("NLL, nats per token", nll))
    mark_trained(figure, result.trained_length, x)
    add_curves(
        figure,
        [_curve(name_of(method, result), method.nll_by_position, width) for method in result.methods],
        looks=looks(result.names()),
    )
    rows = rows_of(
        method=[name for name, _ in buckets],
        context_start=[bucket.start for _, bucket in buckets],
        context_stop=[bucket.stop for _, bucket in buckets],
        nll_mean=nll,
        tokens=[bucket.tokens for _, bucket in buckets],
    )
    caption = (
        "Mean negative log-likelihood of tokens by how many tokens came before them. A line that rises right of the "
        "trained length loses by longer context; one that keeps falling uses it."
    )
    return Picture("nll-by-position", title, figure, rows, caption)


def _axis(edges: Sequence[int], *, linear: bool) -> dict[str, Any]:
    """Over all buckets; a linear one has their edges as ticks where they are few."""
    title = "tokens of context before the predicted one"
    if not linear:
        return log_axis(title, max(edges[0], FIRST), edges[-1], ticks=edges[1:])
    ticks = edges if len(edges) <= MOST_TICKS else linear_ticks(edges[0], edges[-1], MOST_TICKS)
    return linear_axis(title, edges[0], edges[-1], ticks=ticks)


def _curve(name: str, buckets: Sequence[PositionBucket], width: int | None) -> Curve:
    """A point in the middle of each bucket, on its axis."""
    return Curve(
        name=name,
        x=[b.start + width / 2 if width else math.sqrt(max(b.start, FIRST) * b.stop) for b in buckets],
        y=[bucket.nll_mean for bucket in buckets],
        hover=[f"{b.start:,} to {b.stop - 1:,} tokens of context<br>{b.tokens:,} tokens" for b in buckets],
    )
