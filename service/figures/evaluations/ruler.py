"""RULER scores by length and task, and how far each method's effective length goes."""

from __future__ import annotations

from collections.abc import Iterator

from service.evaluation.formatting import counted, percent
from service.evaluation.results import Row, name_of
from service.evaluation.ruler.results import RulerMethod, RulerResult, TaskScore
from service.figures.drawing.axes import category_axis, log_axis, percent_bar, share_axis, token_axis
from service.figures.drawing.bars import Bar, add_bars
from service.figures.drawing.charts import mark_trained, new_figure, note
from service.figures.drawing.curves import INTERVALS
from service.figures.drawing.panels import WRITTEN, cells_drawn, heat_maps, table_panel
from service.figures.drawing.style import FAINT
from service.figures.evaluations.retrieval import (
    ANSWER,
    NOTHING_FOUND,
    add_scores,
    answer_colours,
    found_anything,
    thin_labels,
)
from service.figures.looks import looks
from service.figures.picture import Picture, rows_of


def ruler_pictures(result: RulerResult) -> Iterator[Picture]:
    """The average by length, effective lengths, and every task by length."""
    yield score_picture(result)
    yield effective_length_picture(result)
    yield task_picture(result)


def score_picture(result: RulerResult) -> Picture:
    """Average over tasks by length with Wilson's intervals, and the threshold."""
    title = f"RULER score by length: {result.model}"
    x = token_axis("length, tokens", result.lengths, result.trained_length)
    figure = new_figure(title, _asked(result))
    figure.update_layout(xaxis=x, yaxis=share_axis("share of expected answers"))
    figure.add_hline(y=result.threshold, line={"color": FAINT, "dash": "dot", "width": 1.2})
    figure.add_annotation(
        x=1, xref="x domain", xanchor="right", y=result.threshold, yref="y", yanchor="bottom", showarrow=False,
        text=f"threshold {percent(result.threshold)}", font={"size": 11, "color": FAINT},
    )  # fmt: skip
    mark_trained(figure, result.trained_length, x)
    rows = add_scores(figure, result)
    if not found_anything([at for method in result.methods for at in method.lengths]):
        note(figure, "nothing was found at any length")
    caption = (
        "Average over all tasks. A length is effective while the average there and at every shorter length is above "
        f"the threshold. {INTERVALS}"
    )
    return Picture("ruler", title, figure, rows, " ".join([caption, *result.cautions()]))


def effective_length_picture(result: RulerResult) -> Picture:
    """A bar per method, on a logarithmic axis of the lengths that were measured."""
    names = [name_of(method, result) for method in result.methods]
    title = f"Effective length: {result.model}"
    threshold = f"longest length with an average above {percent(result.threshold)}, at every shorter one too"
    figure = new_figure(title, f"{threshold} · {_asked(result)}")
    first, last = min(*result.lengths, result.trained_length), max(*result.lengths, result.trained_length)
    x = log_axis("effective length, tokens", first / 2, last * 1.1, ticks=result.lengths)
    lengths, look = [method.effective_length for method in result.methods], looks(names)
    bars = [
        Bar(name, method.effective_length, _length_text(method, result), look[name])
        for name, method in zip(names, result.methods, strict=True)
    ]
    add_bars(figure, bars, x)
    mark_trained(figure, result.trained_length, x)
    caption = "A method whose bar is at the longest length that was measured may go further."
    return Picture("effective-length", title, figure, rows_of(method=names, effective_length=lengths), caption)


def task_picture(result: RulerResult) -> Picture:
    """A panel per method: score of every task (y) at every length (x). If all scores are 0, y is the answer's NLL."""
    scored = found_anything([at for method in result.methods for at in method.tasks])
    title = f"RULER tasks by length: {result.model}"
    if not scored:
        title = f"NLL of the expected answer by task and length: {result.model}"
    lengths, tasks = cells_drawn(result.lengths, result.tasks, len(result.methods))
    text = percent if scored else "{:.2f}".format
    panels = []
    for method in result.methods:
        found = {(at.task, at.length): at for at in method.tasks}
        table = [[found.get((task, length)) for length in lengths] for task in tasks]
        panels.append(
            table_panel(name_of(method, result), table, lambda at: at.score if scored else at.answer_nll, text, _hover)
        )
    axes = (
        category_axis("length, tokens", thin_labels([f"{length:,}" for length in lengths], WRITTEN)),
        category_axis("", tasks, reverse=True),
    )
    nll = [at.answer_nll for method in result.methods for at in method.tasks]
    colours = {"cmin": 0, "cmax": 1, "colorbar": percent_bar("score")} if scored else answer_colours(nll)
    figure = heat_maps(panels, (title, _asked(result)), axes, colours, panel_height=max(180, 26 * len(tasks)))
    figure.update_layout(margin_l=130)
    if len(lengths) < len(result.lengths):
        note(figure, f"{len(lengths):,} of {len(result.lengths):,} lengths are drawn")
    if not scored:
        note(figure, NOTHING_FOUND)
    rows: list[Row] = [
        {"method": name_of(method, result), "length": at.length, "task": at.task, **at.row()}
        for method in result.methods
        for at in method.tasks
    ]
    caption = "Light: answered. Tasks fail at different lengths." if scored else ANSWER
    return Picture("ruler-tasks", title, figure, rows, caption)


def _hover(at: TaskScore) -> str:
    return (
        f"{at.task} at {at.length:,} tokens: {percent(at.score)}, {counted(at.samples, 'sample')}"
        f"<br>NLL of the answer {at.answer_nll:.4g} nats per token"
    )


def _length_text(method: RulerMethod, result: RulerResult) -> str:
    if method.effective_length is None:
        return f"below {min(result.lengths):,}"
    more = " or more" if method.effective_length == max(result.lengths) else ""
    return f"{method.effective_length:,}{more}"


def _asked(result: RulerResult) -> str:
    return f"{counted(len(result.tasks), 'task')}, {counted(result.samples, 'prompt')} per task and length"
