"""Any result as a table for a terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from service.evaluation.formatting import short_number, spaced
from service.evaluation.results import EvaluationResult, Overview, Score, Scores

MOST_COLUMNS = 8
"""Lengths that a terminal of 80 columns has room for."""
BEST = "bold green"


def table_of(result: EvaluationResult) -> Table:
    """The main numbers, to print under the result's heading."""
    overview = result.overview()
    return _by_length(result, result.scores()) if overview is None else _overview(overview)


def _by_length(result: EvaluationResult, scores: Scores) -> Table:
    """Methods as rows, lengths as columns. The best of each column is green, lengths past the trained one yellow."""
    lengths = scores.lengths()
    shown = spaced(lengths, result.trained_length, MOST_COLUMNS) if len(lengths) > MOST_COLUMNS else lengths
    left_out = len(lengths) - len(shown)
    parts = [f"{scores.by}, tokens", f"trained length {result.trained_length:,}", scores.note]
    table = _new(*parts, *result.cautions(), f"{left_out} more measured" if left_out else "")
    table.add_column("method", overflow="fold", min_width=12)
    for length in shown:
        style = "bold" if length <= result.trained_length else "bold yellow"
        table.add_column(Text(f"{length:,}", style=style), justify="right", no_wrap=True)
    has_effective = any(scores.effective_lengths)
    if has_effective:
        table.add_column("effective length", justify="right")
    choose = min if scores.lower_is_better else max
    best = {n: choose((by[n].value for by in scores.by_method if n in by), default=None) for n in shown}
    for row, (name, by_length) in enumerate(zip(result.names(), scores.by_method, strict=True)):
        cells = [_cell(by_length.get(n), best[n], scores) for n in shown]
        if has_effective:
            effective = scores.effective_lengths[row]
            cells.append(Text(f"{effective:,}" if effective else "-"))
        table.add_row(Text(name), *cells)
    return table


def _cell(score: Score | None, best: float | None, scores: Scores) -> Text:
    if score is None:
        return Text("")
    text = short_number(score.value) if scores.lower_is_better else f"{score.value:.2f}"
    return Text(text, style=BEST if score.value == best else "")


def _overview(overview: Overview) -> Table:
    """The best methods are green."""
    table = _new(overview.caption)
    first, *others, last = overview.columns
    table.add_column(first, overflow="fold", min_width=12)
    for column in others:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(last, justify="center")
    for index, (name, *cells) in enumerate(overview.rows):
        table.add_row(Text(name, style=BEST if index in overview.best else ""), *map(Text, cells))
    return table


def _new(*caption: str) -> Table:
    """An empty table with the caption's parts in one line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption = Text("; ".join(filter(None, caption)))
    table.caption_justify = "left"
    return table
