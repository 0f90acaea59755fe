"""Where queries attend, and how well repeated tokens are copied, by distance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.evaluation.probe.results import Attention, DistanceBucket, HeadAttention, ProbeResult
from service.evaluation.results import Row, documents_text, name_of
from service.figures.axes import linear_axis, log_axis, percent, share_axis, token_axis
from service.figures.charts import (
    Curve,
    add_curves,
    counted,
    curve_traces,
    mark_trained,
    new_figure,
    room_for,
)
from service.figures.nll import nll_by_position
from service.figures.panels import COLUMNS, grid, place
from service.figures.picture import Picture
from service.figures.style import line_style


def probe_pictures(result: ProbeResult) -> list[Picture]:
    """Attention by distance at every length, copying by distance, loss by position."""
    by_position = nll_by_position(result, result.methods, result.lengths[-1], result.documents)
    pictures = [attention_picture(result, length) for length in reversed(result.lengths)]
    if any(method.copying for method in result.methods):
        pictures.append(copying_picture(result))
    return [*pictures, *([by_position] if by_position else [])]


def attention_picture(result: ProbeResult, length: int) -> Picture:
    """Attention mass per bucket of distance: the mean of all heads of every method, then each method's heads."""
    names = [name_of(method, result) for method in result.methods]
    means = [_at(method.attention_mean, length) for method in result.methods]
    heads = [_by_head(method.attention, length) for method in result.methods]
    title = f"Attention by distance at {length:,} tokens: {result.model}"
    subtitle = f"mass per bucket of distance, last {result.queries:,} queries · {documents_text(result.documents)}"
    figure = grid(["all methods, mean of all heads", *names], (title, subtitle), columns=COLUMNS, panel_height=230,
                  right=room_for(names, 76))  # fmt: skip
    edges = sorted({edge for mean in means for bucket in mean for edge in (bucket.start, bucket.stop)})
    x = log_axis("distance, tokens", max(edges[0], 0.5), edges[-1], ticks=_spread([e for e in edges if e]))
    top = max(bucket.mass for of_heads in heads for head in of_heads.values() for bucket in head)
    y = linear_axis("share of attention", 0, 1.05 * top)
    count = len(names) + 1
    panel = place(figure, 0, count, COLUMNS, (x, y))
    for index, (name, mean) in enumerate(zip(names, means, strict=True)):
        figure.add_traces(
            curve_traces(_curve(name, mean), line_style(index), str(index)), rows=panel["row"], cols=panel["col"]
        )
    mark_trained(figure, result.trained_length, x, named=False, **panel)
    for index, (name, mean) in enumerate(zip(names, means, strict=True)):
        panel = place(figure, index + 1, count, COLUMNS, (x, y))
        for (layer, head), buckets in heads[index].items():
            faint = curve_traces(_curve(f"layer {layer}, head {head}", buckets), line_style(index), "", faint=True)
            figure.add_traces(faint, rows=panel["row"], cols=panel["col"])
        bold = curve_traces(_curve(name, mean), line_style(index), str(index))
        bold[-1].showlegend = False
        figure.add_traces(bold, rows=panel["row"], cols=panel["col"])
        mark_trained(figure, result.trained_length, x, named=False, **panel)
    rows: list[Row] = []
    for name, mean, of_heads in zip(names, means, heads, strict=True):
        rows += _rows(name, None, None, mean)
        for (layer, head), buckets in of_heads.items():
            rows += _rows(name, layer, head, buckets)
    caption = (
        "Where the last queries look: softmax mass on keys by distance, bold the mean of all heads, faint every head. "
        f"The dashed line is the trained length, {result.trained_length:,} tokens. Buckets double in width, so a rise "
        "to the right need not mean more attention to each key."
    )
    return Picture(f"attention-{length}", title, figure, rows, caption)


def copying_picture(result: ProbeResult) -> Picture:
    """Share of repeated tokens that are predicted, by the distance to their first occurrence."""
    title = f"Copying by distance: {result.model}"
    x = token_axis("distance from a token to its copy", result.distances, result.trained_length)
    what = "random tokens" if result.segment_of == "random" else "tokens of the documents"
    figure = new_figure(title, f"{counted(result.samples, 'segment')} of {result.segment} {what}, repeated")
    figure.update_layout(xaxis=x, yaxis=share_axis("most likely token is right"))
    mark_trained(figure, result.trained_length, x)
    add_curves(
        figure,
        [
            Curve(
                name_of(method, result),
                [at.distance for at in method.copying],
                [at.accuracy for at in method.copying],
                [at.interval.low for at in method.copying],
                [at.interval.high for at in method.copying],
                [
                    f"without anything to copy {percent(at.accuracy_first)}<br>NLL {at.nll_mean:.4g} nats per token, "
                    f"first time {at.nll_first:.4g}<br>{at.tokens:,} tokens"
                    for at in method.copying
                ],
            )
            for method in result.methods
        ],
    )
    rows: list[Row] = [
        {
            "method": name_of(method, result),
            "distance": at.distance,
            "accuracy": at.accuracy,
            "interval_low": at.interval.low,
            "interval_high": at.interval.high,
            "nll_mean": at.nll_mean,
            "accuracy_first": at.accuracy_first,
            "nll_first": at.nll_first,
            "tokens": at.tokens,
        }
        for method in result.methods
        for at in method.copying
    ]
    caption = "A model that copies attends to where the same tokens stood. Shaded: 95 % intervals (Wilson)."
    return Picture("copying", title, figure, rows, caption)


def _at(measured: Sequence[Attention], length: int) -> list[DistanceBucket]:
    return next((at.buckets for at in measured if at.length == length), [])


def _by_head(measured: Sequence[HeadAttention], length: int) -> dict[tuple[int, int], list[DistanceBucket]]:
    return {(at.layer, at.head): at.buckets for at in measured if at.length == length}


def _curve(name: str, buckets: Sequence[DistanceBucket]) -> Curve:
    return Curve(
        name,
        [math.sqrt(max(bucket.start, 0.5) * bucket.stop) for bucket in buckets],
        [bucket.mass for bucket in buckets],
        hover=[f"distance {bucket.start:,} to {bucket.stop - 1:,}" for bucket in buckets],
    )


def _rows(name: str, layer: int | None, head: int | None, buckets: Sequence[DistanceBucket]) -> list[Row]:
    return [
        {"method": name, "layer": layer, "head": head, "start": b.start, "stop": b.stop, "mass": b.mass}
        for b in buckets
    ]


def _spread(edges: Sequence[int], most: int = 6) -> list[int]:
    """At most ``most`` of the edges, the last among them."""
    every = -(-len(edges) // most)
    return list(edges[::-1][::every][::-1])
