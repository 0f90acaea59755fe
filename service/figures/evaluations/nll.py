"""NLL of tokens by the length of their context."""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.evaluation.perplexity.results import MethodResult
from service.evaluation.probe.results import ProbeMethod
from service.evaluation.results import DocumentInfo, EvaluationResult, documents_text, name_of
from service.evaluation.statistics.nll import PositionBucket
from service.figures.drawing.axes import linear_axis, log_axis
from service.figures.drawing.charts import mark_trained, new_figure
from service.figures.drawing.curves import Curve, add_curves
from service.figures.looks import looks
from service.figures.picture import Picture, rows_of

FIRST = 8
"""Start of the bucket of no context on a logarithmic axis."""


def nll_by_position(
    result: EvaluationResult,
    methods: Sequence[MethodResult] | Sequence[ProbeMethod],
    length: int,
    documents: Sequence[DocumentInfo],
) -> Picture | None:
    """Mean NLL in nats of the tokens in each bucket of context, in passes of ``length``.

    None for fewer than two buckets: one bucket is the mean of all tokens.
    """
    buckets = [(name_of(method, result), bucket) for method in methods for bucket in method.nll_by_position]
    edges = sorted({edge for _, bucket in buckets for edge in (bucket.start, bucket.stop)})
    if len(edges) < 3:
        return None
    title = f"NLL by position in passes of {length:,} tokens: {result.model}"
    figure = new_figure(title, documents_text(documents))
    x = log_axis("tokens of context before the predicted one", max(edges[0], FIRST), edges[-1], ticks=edges[1:])
    nll = [bucket.nll_mean for _, bucket in buckets]
    margin = max(0.05 * (max(nll) - min(nll)), 0.02)
    figure.update_layout(xaxis=x, yaxis=linear_axis("NLL, nats per token", min(nll) - margin, max(nll) + margin))
    mark_trained(figure, result.trained_length, x)
    add_curves(
        figure,
        [_curve(name_of(method, result), method.nll_by_position) for method in methods],
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


def _curve(name: str, buckets: Sequence[PositionBucket]) -> Curve:
    return Curve(
        name=name,
        x=[math.sqrt(max(bucket.start, FIRST) * bucket.stop) for bucket in buckets],
        y=[bucket.nll_mean for bucket in buckets],
        hover=[f"{b.start:,} to {b.stop - 1:,} tokens of context<br>{b.tokens:,} tokens" for b in buckets],
    )
