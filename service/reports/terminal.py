"""Any result as a few lines and a table for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.perplexity.tables import BEST, TERMINAL_COLUMNS, heading, perplexity_rich, short_number, spaced
from service.evaluation.results import EvaluationResult, name_of
from service.evaluation.scores import Score, Scores, scores_of
from service.evaluation.sweep.results import Judgement, SweepMethod, SweepResult


def table_of(result: EvaluationResult) -> list[RenderableType]:
    """What was measured, then the numbers."""
    if isinstance(result, PerplexityResult):
        return [Text(heading(result), style="bold"), perplexity_rich(result)]
    if isinstance(result, SweepResult):
        return [Text(result.answer.words, style="bold"), _judgements(result)]
    scores = scores_of(result)
    title = f"{scores.measure[0].upper()}{scores.measure[1:]} of {result.model} by {scores.columns.partition(',')[0]}"
    return [Text(title, style="bold"), _scores(result, scores)]


def _scores(result: EvaluationResult, scores: Scores) -> Table:
    """Methods as rows, lengths as columns, the best of each column in green."""
    lengths = sorted({length for by_length in scores.by_method for length in by_length})
    shown = spaced(lengths, result.trained_length, TERMINAL_COLUMNS) if len(lengths) > TERMINAL_COLUMNS else lengths
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=12)
    for length in shown:
        style = "bold" if length <= result.trained_length else "bold yellow"
        table.add_column(Text(f"{length:,}", style=style), justify="right", no_wrap=True)
    methods = result.methods  # type: ignore[attr-defined]
    effective = [getattr(method, "effective_length", None) for method in methods]
    if any(effective):
        table.add_column("effective length", justify="right")
    choose = min if scores.lower_is_better else max
    best = {n: choose((by[n].value for by in scores.by_method if n in by), default=None) for n in shown}
    for method, by_length, reach in zip(methods, scores.by_method, effective, strict=True):
        cells = [_cell(by_length.get(n), best[n], scores) for n in shown]
        table.add_row(
            Text(name_of(method, result)), *cells, *([f"{reach:,}" if reach else "-"] if any(effective) else [])
        )
    left_out = len(lengths) - len(shown)
    more = f"; {left_out} more measured" if left_out else ""
    table.caption = Text(f"{scores.columns}; trained length {result.trained_length:,}{more}")
    table.caption_justify = "left"
    return table


def _cell(score: Score | None, best: float | None, scores: Scores) -> Text:
    if score is None:
        return Text("")
    text = short_number(score.value) if scores.lower_is_better else f"{score.value:.2f}"
    return Text(text, style=BEST if score.value == best else "")


def _judgements(result: SweepResult) -> Table:
    """One row per method by rank: its number by every evaluation, and whether it is good enough."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=12)
    for part in result.evaluations:
        table.add_column(part.evaluation.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("good enough", justify="center")
    for method in sorted(result.methods, key=lambda method: method.rank):
        name = Text(name_of(method, result), style=BEST if result.answer.best and method.rank == 1 else "")
        table.add_row(name, *(_judgement(at) for at in method.judgements), _verdict(method))
    table.caption = Text(f"at {result.target_length:,} tokens; trained length {result.trained_length:,}")
    table.caption_justify = "left"
    return table


def _judgement(at: Judgement) -> str:
    if at.value is None:
        return "-"
    interval = f" [{at.interval.low:.3g}, {at.interval.high:.3g}]" if at.interval else ""
    return f"{short_number(at.value) if at.value >= 1 else f'{at.value:.2f}'}{interval}"


def _verdict(method: SweepMethod) -> str:
    return ("yes" if method.adequate else "no") + ("" if method.sure else "?")
