"""RULER scores by length and task, and how far each method's effective length goes."""

from __future__ import annotations

from service.evaluation.results import Row, name_of
from service.evaluation.ruler.results import RulerMethod, RulerResult
from service.figures.axes import category_axis, log_axis, percent, percent_bar, share_axis, token_axis
from service.figures.charts import Bars, add_bars, add_curves, counted, mark_trained, new_figure
from service.figures.panels import Panel, heat_maps
from service.figures.picture import Picture, rows_of
from service.figures.retrieval import score_curve
from service.figures.style import FAINT


def ruler_pictures(result: RulerResult) -> list[Picture]:
    """The average by length, effective lengths, and every task by length."""
    return [score_picture(result), effective_length_picture(result), task_picture(result)]


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
    add_curves(figure, [score_curve(name_of(method, result), method.lengths) for method in result.methods])
    scores = [(name_of(method, result), at) for method in result.methods for at in method.lengths]
    rows: list[Row] = [{"method": name, "length": at.length, **at.row()} for name, at in scores]
    caption = (
        "Average over all tasks. Shaded: 95 % intervals. A length is effective while the average there and at every "
        "shorter length is above the threshold."
    )
    return Picture("ruler", title, figure, rows, caption)


def effective_length_picture(result: RulerResult) -> Picture:
    """A bar per method, on a logarithmic axis of the lengths that were measured."""
    names = [name_of(method, result) for method in result.methods]
    title = f"Effective length: {result.model}"
    threshold = f"longest length with an average above {percent(result.threshold)}, at every shorter one too"
    figure = new_figure(title, f"{threshold} · {_asked(result)}")
    first, last = min(*result.lengths, result.trained_length), max(*result.lengths, result.trained_length)
    x = log_axis("effective length, tokens", first / 2, last * 1.1, ticks=result.lengths)
    lengths = [method.effective_length for method in result.methods]
    add_bars(figure, Bars(names, lengths, [_length_text(method, result) for method in result.methods]), x)
    mark_trained(figure, result.trained_length, x)
    caption = "A method whose bar is at the longest length that was measured may go further."
    return Picture("effective-length", title, figure, rows_of(method=names, effective_length=lengths), caption)


def task_picture(result: RulerResult) -> Picture:
    """A panel per method: score of every task (y) at every length (x)."""
    title = f"RULER tasks by length: {result.model}"
    panels = []
    for method in result.methods:
        found = {(at.task, at.length): at for at in method.tasks}
        grid = [[found.get((task, length)) for length in result.lengths] for task in result.tasks]
        panels.append(
            Panel(
                name_of(method, result),
                range(len(result.lengths)),
                range(len(result.tasks)),
                [[at.score if at else None for at in line] for line in grid],
                [[percent(at.score) if at else "" for at in line] for line in grid],
                [[f"{at.task} at {at.length:,}: {percent(at.score)}, {at.samples} samples" if at else "" for at in line]
                 for line in grid],
            )
        )  # fmt: skip
    axes = (
        category_axis("length, tokens", [f"{length:,}" for length in result.lengths]),
        category_axis("", result.tasks, reverse=True),
    )
    colours = {"cmin": 0, "cmax": 1, "colorbar": percent_bar("score")}
    figure = heat_maps(panels, (title, _asked(result)), axes, colours, panel_height=max(180, 26 * len(result.tasks)))
    figure.update_layout(margin_l=130)
    rows: list[Row] = [
        {"method": name_of(method, result), "length": at.length, "task": at.task, **at.row()}
        for method in result.methods
        for at in method.tasks
    ]
    return Picture("ruler-tasks", title, figure, rows, "Light: answered. Tasks fail at different lengths.")


def _length_text(method: RulerMethod, result: RulerResult) -> str:
    if method.effective_length is None:
        return f"below {min(result.lengths):,}"
    more = " or more" if method.effective_length == max(result.lengths) else ""
    return f"{method.effective_length:,}{more}"


def _asked(result: RulerResult) -> str:
    return f"{counted(len(result.tasks), 'task')}, {counted(result.samples, 'prompt')} per task and length"
