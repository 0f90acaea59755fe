"""Any result as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from service.evaluation.formatting import short_number, spaced
from service.evaluation.results import EvaluationResult, Overview, Score, Scores
from service.evaluation.statistics.separation import ratio_note

MOST_COLUMNS = 8
"""Lengths that a terminal of 80 columns has room for."""
NAME_WIDTH, GAP = 12, 2
"""Least characters of a method's name, and those between two columns."""
BEST = "bold green"


def table_of(result: EvaluationResult, width: int = 80) -> Table:
    """The main numbers, to print under the result's heading in ``width`` columns."""
    overview = result.overview()
    return _by_length(result, result.scores(), width) if overview is None else _overview(overview)


def _by_length(result: EvaluationResult, scores: Scores, width: int) -> Table:
    """Methods as rows, lengths as columns. The best of each column is green, lengths past the trained one yellow.

    Intervals are below the numbers if there is room for all of them.
    """
    lengths = scores.lengths()
    shown = spaced(lengths, result.trained_length, MOST_COLUMNS) if len(lengths) > MOST_COLUMNS else lengths
    left_out = len(lengths) - len(shown)
    intervals = _intervals(scores, shown)
    room = width - NAME_WIDTH - (GAP + len("effective length")) * any(scores.effective_lengths)
    below = bool(intervals) and len(shown) * (GAP + max(map(len, intervals.values()))) <= room
    parts = [f"{scores.by}, tokens", f"trained length {result.trained_length:,}", _note(scores, intervals, below=below)]
    by_ratio = ratio_note(scores) if below else ""
    table = _new(*parts, by_ratio, *result.cautions(), f"{left_out} more measured" if left_out else "")
    table.add_column("method", overflow="fold", min_width=NAME_WIDTH)
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
        if below:
            cells = [
                cell.append(f"\n{intervals.get((row, n), '')}", "dim") for cell, n in zip(cells, shown, strict=True)
            ]
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


def _intervals(scores: Scores, shown: Sequence[int]) -> dict[tuple[int, int], str]:
    """The interval of every cell that has one, by method and length."""
    scored = ((row, n, by[n].interval) for row, by in enumerate(scores.by_method) for n in shown if n in by)
    return {(row, n): f"[{_end(at.low)}, {_end(at.high)}]" for row, n, at in scored if at is not None}


def _end(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 1000 else short_number(value)


def _note(scores: Scores, intervals: Mapping[tuple[int, int], str], *, below: bool) -> str:
    """The kind of the intervals, and their place."""
    if not intervals:
        return scores.note
    note = scores.note or "95 % interval"
    return f"below: {note}" if below else f"{note}: in --csv"


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
    return table
