"""What was found in a haystack: by length and depth, and by length."""

from __future__ import annotations

from collections.abc import Sequence

from service.evaluation.results import documents_text, name_of
from service.evaluation.retrieval.results import DepthResult, DepthScore, LengthScore
from service.figures.axes import category_axis, percent, percent_bar, share_axis, token_axis
from service.figures.charts import Curve, add_curves, counted, mark_trained, new_figure
from service.figures.panels import Axes, Panel, heat_maps
from service.figures.picture import Picture, rows_of

WRITTEN = 8
"""Cells have their numbers in them up to so many lengths."""


def retrieval_pictures(result: DepthResult) -> list[Picture]:
    """The score by length and depth, by length, and the expected answer's NLL by length and depth."""
    return [depth_picture(result), score_picture(result), answer_picture(result)]


def depth_picture(result: DepthResult) -> Picture:
    """A panel per method: share found at every length (x) and depth (y)."""
    title = f"{result.evaluation.capitalize()} by length and depth: {result.model}"
    return _heat_picture(
        result,
        ("retrieval", title, f"share found · {_asked(result)}"),
        [[cell.score for cell in method.cells] for method in result.methods],
        {"cmin": 0, "cmax": 1, "colorbar": percent_bar("found")},
        "Depth is the share of the text that stands before what is to be found. Light: found. Right of the trained "
        f"length of {result.trained_length:,} tokens, what stands far back is at distances that the model never saw.",
    )


def answer_picture(result: DepthResult) -> Picture:
    """A panel per method: mean NLL of the expected answer, in nats per token."""
    values = [[cell.answer_nll for cell in method.cells] for method in result.methods]
    low, high = min(map(min, values)), max(map(max, values))
    return _heat_picture(
        result,
        ("answer-nll", f"NLL of the expected answer: {result.model}", f"nats per token · {_asked(result)}"),
        values,
        {
            "cmin": low,
            "cmax": high if high > low else low + 1,
            "reversescale": True,
            "colorbar": {"title": {"text": "nats"}},
        },
        "How unlikely the right answer was, token by token. Light: likely. It tells encodings apart where a model is "
        "too small to answer.",
    )


def score_picture(result: DepthResult) -> Picture:
    """Score by length with Wilson's intervals, one line per method."""
    title = f"{result.evaluation.capitalize()} by length: {result.model}"
    x = token_axis("length, tokens", result.lengths, result.trained_length)
    figure = new_figure(title, f"share found over all depths · {_asked(result)}")
    figure.update_layout(xaxis=x, yaxis=share_axis("share found"))
    mark_trained(figure, result.trained_length, x)
    add_curves(figure, [score_curve(name_of(method, result), method.lengths) for method in result.methods])
    scores = [(name_of(method, result), at) for method in result.methods for at in method.lengths]
    rows = rows_of(method=[name for name, _ in scores], length=[at.length for _, at in scores])
    rows = [row | at.row() for row, (_, at) in zip(rows, scores, strict=True)]
    caption = "Over all depths. Shaded: 95 % intervals of the share (Wilson)."
    return Picture("retrieval-by-length", title, figure, rows, caption)


def score_curve(name: str, scores: Sequence[LengthScore]) -> Curve:
    """A score by length with its intervals."""
    return Curve(
        name,
        [at.length for at in scores],
        [at.score for at in scores],
        [at.interval.low for at in scores],
        [at.interval.high for at in scores],
        [
            f"95 % interval {percent(at.interval.low)} to {percent(at.interval.high)}<br>{at.samples:,} samples"
            for at in scores
        ],
    )


def _heat_picture(
    result: DepthResult,
    titles: tuple[str, str, str],
    values: Sequence[Sequence[float]],
    colours: dict[str, object],
    caption: str,
) -> Picture:
    """``values`` [methods][cells]; ``titles`` are the picture's name, title and subtitle."""
    share = titles[0] == "retrieval"
    panels = []
    for method, of_cells in zip(result.methods, values, strict=True):
        found = {(cell.length, cell.depth): value for cell, value in zip(method.cells, of_cells, strict=True)}
        cells = {(cell.length, cell.depth): cell for cell in method.cells}
        grid = [[(length, depth) for length in result.lengths] for depth in result.depths]
        panels.append(
            Panel(
                name_of(method, result),
                range(len(result.lengths)),
                range(len(result.depths)),
                [[found.get(at) for at in line] for line in grid],
                [[_written(found.get(at), share) for at in line] for line in grid]
                if len(result.lengths) <= WRITTEN
                else None,
                [[_hover(cells.get(at)) for at in line] for line in grid],
            )
        )
    figure = heat_maps(panels, titles[1:], _axes(result), colours, panel_height=max(180, 30 * len(result.depths)))
    cells_of = [(name_of(method, result), cell) for method in result.methods for cell in method.cells]
    rows = rows_of(
        method=[name for name, _ in cells_of],
        length=[cell.length for _, cell in cells_of],
        depth=[cell.depth for _, cell in cells_of],
        value=[value for of_cells in values for value in of_cells],
        samples=[cell.samples for _, cell in cells_of],
    )
    return Picture(titles[0], titles[1], figure, rows, caption)


def _axes(result: DepthResult) -> Axes:
    every = -(-len(result.lengths) // WRITTEN)
    last = (len(result.lengths) - 1) % every
    lengths = [f"{n:,}" if i % every == last else "" for i, n in enumerate(result.lengths)]
    depths = [percent(depth) for depth in result.depths]
    return category_axis("length, tokens", lengths), category_axis("depth", depths, reverse=True)


def _written(value: float | None, share: bool) -> str:
    if value is None:
        return ""
    return percent(value) if share else f"{value:.2f}"


def _hover(cell: DepthScore | None) -> str:
    if cell is None:
        return ""
    return (
        f"{cell.length:,} tokens, depth {percent(cell.depth)}: {percent(cell.score)} found"
        f"<br>95 % interval {percent(cell.interval.low)} to {percent(cell.interval.high)}, {cell.samples} samples"
        f"<br>NLL of the answer {cell.answer_nll:.4g} nats per token"
    )


def _asked(result: DepthResult) -> str:
    where = documents_text(result.documents) if result.documents else "the published filler"
    return f"{counted(result.samples, 'prompt')} per cell · {where}"
