"""Attention and copying of repeated tokens, by distance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from service.evaluation.formatting import counted, percent
from service.evaluation.probe.results import Attention, Copying, DistanceBucket, HeadAttention, ProbeResult
from service.evaluation.results import Row, documents_text, name_of
from service.evaluation.scores import ENDS, interval_columns
from service.figures.drawing.axes import linear_axis, log_axis, share_axis, spread, thinned, token_axis
from service.figures.drawing.charts import labels, mark_trained, new_figure, note, room_for
from service.figures.drawing.curves import INTERVALS, Curve, add_curves, curve_traces
from service.figures.drawing.panels import COLUMNS, grid, place
from service.figures.drawing.style import line_style
from service.figures.evaluations.nll import nll_by_position
from service.figures.looks import looks
from service.figures.picture import Picture

MOST_LENGTHS = 8
"""Lengths with a picture of attention, at most: both ends and equal steps between them."""
MOST_HEADS = 512
"""Heads in one picture over all methods, at most."""


def probe_pictures(result: ProbeResult) -> Iterator[Picture]:
    """Attention by distance at up to ``MOST_LENGTHS`` lengths, copying by distance, NLL by position."""
    for length in reversed(spread(result.lengths, MOST_LENGTHS)):
        yield attention_picture(result, length)
    if any(method.copying for method in result.methods):
        yield copying_picture(result)
    by_position = nll_by_position(result)
    if by_position is not None:
        yield by_position


def attention_picture(result: ProbeResult, length: int) -> Picture:
    """Attention mass per bucket of distance: the mean of all heads of every method, then each method's heads."""
    names = result.names()
    look, texts = looks(names), labels(names)
    means = [_at(method.attention_mean, length) for method in result.methods]
    heads = [_by_head(method.attention, length) for method in result.methods]
    title = f"Attention by distance at {length:,} tokens: {result.model}"
    subtitle = f"share per range of distances, last {result.queries:,} queries · {documents_text(result.documents)}"
    figure = grid(["all methods, mean of all heads", *names], (title, subtitle), columns=COLUMNS, panel_height=230,
                  right=room_for(names, 76))  # fmt: skip
    edges = sorted({edge for mean in means for bucket in mean for edge in (bucket.start, bucket.stop)})
    x = log_axis(
        "distance from query to key, tokens", max(edges[0], 0.5), edges[-1], ticks=thinned([e for e in edges if e], 6)
    )
    y = _share_axis(max(bucket.mass for of_heads in heads for head in of_heads.values() for bucket in head))
    count = len(names) + 1
    panel = place(figure, 0, count, COLUMNS, (x, y))
    for index, (name, mean) in enumerate(zip(names, means, strict=True)):
        figure.add_traces(
            curve_traces(_curve(name, mean), line_style(look[name]), str(index), text=texts[name]),
            rows=panel["row"],
            cols=panel["col"],
        )
    mark_trained(figure, result.trained_length, x, named=False, **panel)
    for index, (name, mean) in enumerate(zip(names, means, strict=True)):
        panel = place(figure, index + 1, count, COLUMNS, (x, y))
        chosen = spread(list(heads[index].items()), max(MOST_HEADS // len(names), 2))
        faint = curve_traces(_heads_curve(dict(chosen)), line_style(look[name]), "", faint=True)
        figure.add_traces(faint, rows=panel["row"], cols=panel["col"])
        bold = curve_traces(_curve(name, mean), line_style(look[name]), str(index), text=texts[name])
        bold[-1].showlegend = False
        figure.add_traces(bold, rows=panel["row"], cols=panel["col"])
        mark_trained(figure, result.trained_length, x, named=False, **panel)
    drawn, measured = min(len(heads[0]), max(MOST_HEADS // len(names), 2)), len(heads[0])
    if drawn < measured:
        note(figure, f"{drawn:,} of {measured:,} heads are drawn")
    if len(result.lengths) > MOST_LENGTHS:
        note(figure, f"pictures are of {MOST_LENGTHS} of {len(result.lengths):,} lengths")
    rows: list[Row] = []
    for name, mean, of_heads in zip(names, means, heads, strict=True):
        rows += _rows(name, None, None, mean)
        for (layer, head), buckets in of_heads.items():
            rows += _rows(name, layer, head, buckets)
    caption = (
        "The share of their attention that the last queries give to keys at each distance. Bold is the mean of all "
        f"heads, faint are single heads. The dashed line is the trained length, {result.trained_length:,} tokens. "
        "Ranges of distances double in width, so a rise to the right need not mean more attention to each key."
    )
    return Picture(f"attention-{length}", title, figure, rows, caption)


def copying_picture(result: ProbeResult) -> Picture:
    """Share of repeated tokens that are predicted, by the distance to their first occurrence."""
    title = f"Copying by distance: {result.model}"
    x = token_axis("distance from a token to its copy, tokens", result.distances, result.trained_length)
    what = "random tokens" if result.segment_of == "random" else "tokens of the documents"
    figure = new_figure(title, f"{counted(result.samples, 'segment')} of {result.segment} {what}, repeated")
    figure.update_layout(xaxis=x, yaxis=share_axis("most likely token is right"))
    mark_trained(figure, result.trained_length, x)
    add_curves(
        figure,
        [
            Curve.through(
                name_of(method, result),
                [(at.distance, at.accuracy, at.interval, _copying_hover(at)) for at in method.copying],
                percent,
            )
            for method in result.methods
        ],
        "one distance was measured",
        looks=looks(result.names()),
    )
    rows: list[Row] = [
        {
            "method": name_of(method, result),
            "distance": at.distance,
            "accuracy": at.accuracy,
            **interval_columns(at.interval, ENDS),
            "nll_mean": at.nll_mean,
            "accuracy_first": at.accuracy_first,
            "nll_first": at.nll_first,
            "tokens": at.tokens,
        }
        for method in result.methods
        for at in method.copying
    ]
    caption = f"A model that copies attends to the earlier position of the same tokens. {INTERVALS}"
    return Picture("copying", title, figure, rows, caption)


def _copying_hover(at: Copying) -> str:
    return (
        f"without anything to copy {percent(at.accuracy_first)}<br>NLL {at.nll_mean:.4g} nats per token, "
        f"first time {at.nll_first:.4g}<br>{at.tokens:,} tokens"
    )


def _at(measured: Sequence[Attention], length: int) -> list[DistanceBucket]:
    return next((at.buckets for at in measured if at.length == length), [])


def _by_head(measured: Sequence[HeadAttention], length: int) -> dict[tuple[int, int], list[DistanceBucket]]:
    return {(at.layer, at.head): at.buckets for at in measured if at.length == length}


def _curve(name: str, buckets: Sequence[DistanceBucket]) -> Curve:
    return Curve(
        name,
        [_centre(bucket) for bucket in buckets],
        [bucket.mass for bucket in buckets],
        hover=[_hover(bucket) for bucket in buckets],
    )


def _heads_curve(heads: Mapping[tuple[int, int], Sequence[DistanceBucket]]) -> Curve:
    """All heads as one line with gaps: a trace per head takes a browser seconds."""
    x: list[float] = []
    y: list[float | None] = []
    hover: list[str] = []
    for (layer, head), buckets in heads.items():
        x += [_centre(bucket) for bucket in buckets]
        y += [bucket.mass for bucket in buckets]
        hover += [f"layer {layer}, head {head}<br>{_hover(bucket)}" for bucket in buckets]
        if buckets:
            x, y, hover = [*x, x[-1]], [*y, None], [*hover, ""]
    return Curve("single heads", x, y, hover=hover)


def _centre(bucket: DistanceBucket) -> float:
    """The middle of a range of distances on a logarithmic axis."""
    return math.sqrt(max(bucket.start, 0.5) * bucket.stop)


def _hover(bucket: DistanceBucket) -> str:
    return f"distance {bucket.start:,} to {bucket.stop - 1:,} tokens: {percent(bucket.mass)}"


def _rows(name: str, layer: int | None, head: int | None, buckets: Sequence[DistanceBucket]) -> list[Row]:
    return [
        {"method": name, "layer": layer, "head": head, "start": b.start, "stop": b.stop, "mass": b.mass}
        for b in buckets
    ]


def _share_axis(top: float) -> dict[str, Any]:
    """From 0 to the largest share, in percent."""
    step = next(step for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25) if top / step <= 5)
    ticks = [step * count for count in range(6) if step * count <= 1.05 * top]
    return {**linear_axis("share of attention", 0, 1.05 * top, ticks=ticks), "ticktext": [percent(at) for at in ticks]}
