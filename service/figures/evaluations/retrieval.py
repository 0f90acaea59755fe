"""Retrieval scores by length and depth, and by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from service.evaluation.formatting import counted, percent
from service.evaluation.results import Row, documents_text, name_of
from service.evaluation.retrieval.results import Averages, DepthResult, DepthScore
from service.evaluation.ruler.results import RulerResult
from service.figures.drawing.axes import category_axis, loss_axis, percent_bar, share_axis, token_axis
from service.figures.drawing.charts import mark_trained, new_figure, note
from service.figures.drawing.curves import INTERVALS, Curve, add_curves, interval_text
from service.figures.drawing.panels import WRITTEN, Axes, cells_drawn, heat_maps, table_panel
from service.figures.looks import looks
from service.figures.picture import Picture, rows_of

NOTHING_FOUND = "nothing was found at any length: shown is how likely the right answer was"


class Measure(NamedTuple):
    """A number of every cell: the picture's name, title and subtitle, the value, its text, colours and caption."""

    name: str
    title: str
    subtitle: str
    value: Callable[[Averages], float]
    text: Callable[[float], str]
    colours: dict[str, object]
    caption: str


def retrieval_pictures(result: DepthResult) -> Iterator[Picture]:
    """The score by length and depth, by length, and the expected answer's NLL by length and depth.

    If all scores are zero, the answer's NLL replaces them.
    """
    if found_anything([cell for method in result.methods for cell in method.cells]):
        yield depth_picture(result)
        yield score_picture(result)
        yield answer_picture(result)
    else:
        yield answer_picture(result, NOTHING_FOUND)
        yield answer_by_length(result, NOTHING_FOUND)


def found_anything(scores: Sequence[Averages]) -> bool:
    """True if any score is above zero."""
    return any(at.score > 0 for at in scores)


def depth_picture(result: DepthResult) -> Picture:
    """A panel per method: share found at every length (x) and depth (y)."""
    return _heat_picture(
        result,
        Measure(
            "retrieval",
            f"{result.evaluation.capitalize()} by length and depth: {result.model}",
            f"share found · {_asked(result)}",
            lambda at: at.score,
            percent,
            {"cmin": 0, "cmax": 1, "colorbar": percent_bar("found")},
            "Depth is the share of the text before the passage to find. Light: found. Right of the trained length of "
            f"{result.trained_length:,} tokens, early passages are at distances that the model never saw in training.",
        ),
    )


def answer_picture(result: DepthResult, why: str = "") -> Picture:
    """A panel per method: mean NLL of the expected answer, in nats per token; ``why`` it is shown alone."""
    return _heat_picture(
        result,
        Measure(
            "answer-nll",
            f"NLL of the expected answer by length and depth: {result.model}",
            f"nats per token · {_asked(result)}",
            lambda at: at.answer_nll,
            lambda value: f"{value:.2f}",
            answer_colours([cell.answer_nll for method in result.methods for cell in method.cells]),
            ANSWER,
        ),
        why,
    )


ANSWER = (
    "Mean negative log-likelihood of the right answer's tokens. Lower is better. It distinguishes encodings "
    "even if the model is too small to answer."
)


def answer_colours(values: Sequence[float]) -> dict[str, object]:
    """Colour axis of NLL in nats: light is likely."""
    low, high = min(values), max(values)
    high = high if high > low else low + 1
    return {"cmin": low, "cmax": high, "reversescale": True, "colorbar": {"title": {"text": "nats"}}}


def score_picture(result: DepthResult) -> Picture:
    """Score by length with Wilson's intervals, one line per method."""
    title = f"{result.evaluation.capitalize()} by length: {result.model}"
    x = token_axis("length, tokens", result.lengths, result.trained_length)
    figure = new_figure(title, f"share found over all depths · {_asked(result)}")
    figure.update_layout(xaxis=x, yaxis=share_axis("share found"))
    mark_trained(figure, result.trained_length, x)
    rows = add_scores(figure, result)
    caption = " ".join([f"Over all depths. {INTERVALS}", *result.cautions()])
    return Picture("retrieval-by-length", title, figure, rows, caption)


def add_scores(figure: go.Figure, result: DepthResult | RulerResult) -> list[Row]:
    """Add a line per method: scores by length with Wilson's intervals. Return the same as rows."""
    by_name = [(name_of(method, result), method.lengths) for method in result.methods]
    curves = [
        Curve.through(
            name, [(at.length, at.score, at.interval, counted(at.samples, "sample")) for at in scores], percent
        )
        for name, scores in by_name
    ]
    add_curves(figure, curves, looks=looks(result.names()))
    return [{"method": name, "length": at.length, **at.row()} for name, scores in by_name for at in scores]


def answer_by_length(result: DepthResult, why: str) -> Picture:
    """Mean NLL of the expected answer over all depths by length, in nats per token; ``why`` it is shown."""
    title = f"NLL of the expected answer by length: {result.model}"
    x = token_axis("length, tokens", result.lengths, result.trained_length)
    figure = new_figure(title, f"over all depths · {_asked(result)}")
    values = [at.answer_nll for method in result.methods for at in method.lengths]
    figure.update_layout(xaxis=x, yaxis=loss_axis("NLL of the answer, nats per token", values))
    mark_trained(figure, result.trained_length, x)
    add_curves(
        figure,
        [
            Curve(
                name_of(method, result),
                [at.length for at in method.lengths],
                [at.answer_nll for at in method.lengths],
                hover=[counted(at.samples, "sample") for at in method.lengths],
            )
            for method in result.methods
        ],
        looks=looks(result.names()),
    )
    note(figure, why)
    scores = [(name_of(method, result), at) for method in result.methods for at in method.lengths]
    rows = rows_of(
        method=[name for name, _ in scores],
        length=[at.length for _, at in scores],
        answer_nll=[at.answer_nll for _, at in scores],
        samples=[at.samples for _, at in scores],
    )
    return Picture("answer-nll-by-length", title, figure, rows, ANSWER)


def _heat_picture(result: DepthResult, measure: Measure, why: str = "") -> Picture:
    lengths, depths = cells_drawn(result.lengths, result.depths, len(result.methods))
    panels = []
    for method in result.methods:
        cells = {(cell.length, cell.depth): cell for cell in method.cells}
        table = [[cells.get((length, depth)) for length in lengths] for depth in depths]
        panels.append(table_panel(name_of(method, result), table, measure.value, measure.text, _hover))
    height = max(180, min(30 * len(depths), 480))
    titles = measure.title, measure.subtitle
    figure = heat_maps(panels, titles, _axes(lengths, depths), measure.colours, panel_height=height)
    shown, measured = len(lengths) * len(depths), len(result.lengths) * len(result.depths)
    if shown < measured:
        note(figure, f"{shown:,} of {measured:,} cells are drawn")
    if why:
        note(figure, why)
    cells_of = [(name_of(method, result), cell) for method in result.methods for cell in method.cells]
    rows = rows_of(
        method=[name for name, _ in cells_of],
        length=[cell.length for _, cell in cells_of],
        depth=[cell.depth for _, cell in cells_of],
        value=[measure.value(cell) for _, cell in cells_of],
        samples=[cell.samples for _, cell in cells_of],
    )
    return Picture(measure.name, measure.title, figure, rows, measure.caption)


def _axes(lengths: Sequence[int], depths: Sequence[float]) -> Axes:
    return (
        category_axis("length, tokens", thin_labels([f"{n:,}" for n in lengths], WRITTEN)),
        category_axis("depth", thin_labels([percent(depth) for depth in depths], 2 * WRITTEN), reverse=True),
    )


def thin_labels(labels: Sequence[str], most: int) -> list[str]:
    """``labels`` with all but ``most`` of them empty, the last one kept."""
    every = -(-len(labels) // most)
    last = (len(labels) - 1) % every
    return [text if index % every == last else "" for index, text in enumerate(labels)]


def _hover(cell: DepthScore) -> str:
    return (
        f"{cell.length:,} tokens, depth {percent(cell.depth)}: {percent(cell.score)} found"
        f"<br>{interval_text(cell.interval, percent)}, {counted(cell.samples, 'sample')}"
        f"<br>NLL of the answer {cell.answer_nll:.4g} nats per token"
    )


def _asked(result: DepthResult) -> str:
    where = documents_text(result.documents) if result.documents else "the published filler"
    return f"{counted(result.samples, 'prompt')} per cell · {where}"
