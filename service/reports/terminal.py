"""Any result as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from service.evaluation.formatting import in_cell, short_number, spaced
from service.evaluation.results import EvaluationResult
from service.evaluation.scores import Changes, Overview, Score, Scores
from service.evaluation.statistics.separation import ratio_note

MOST_COLUMNS = 8
"""Lengths that a terminal of 80 columns has room for."""
NAME_WIDTH, WIDEST_WORD, GAP, EDGES = 12, 24, 3, 2
"""Least characters of a method's name, those of a word that stays whole, between two columns, and at both edges."""
BEST = "bold green"

Item = TypeVar("Item")
Cells = Mapping[tuple[int, int], Item]
"""Cells of a table by row and length."""


def table_of(result: EvaluationResult, width: int) -> Table:
    """The main numbers, to print under the result's heading in ``width`` columns."""
    overview = result.overview()
    return _by_length(result, result.scores(), width) if overview is None else _overview(overview)


def table_beside(changes: Changes, result: EvaluationResult, width: int) -> Table:
    """Numbers beside those of partners, like those of ``table_of``. Sure ones have a star."""
    lengths = changes.lengths()
    shown = _shown(lengths, result.trained_length)
    cells = [(row, n, by[n]) for row, by in enumerate(changes.by_method) for n in shown if n in by]
    intervals = {(row, n): f"[{', '.join(at.interval)}]" for row, n, at in cells if at.interval}
    texts = {(row, n): Text(at.marked) for row, n, at in cells}
    below = _fit_below(intervals, shown, changes.names, width)
    where = "--csv" if result.evaluation == "comparison" else "reports, and in `ropeway compare RESULT --csv`"
    place = f"{'below: ' if below else ''}95 % interval{'' if below else f': in {where}'}" if intervals else ""
    table = _new(changes.mark, place, _left_out(lengths, shown))
    _add_columns(table, changes.names, shown, result.trained_length)
    for row, name in enumerate(changes.names):
        table.add_row(Text(in_cell(name)), *_cells(row, shown, texts, intervals if below else {}))
    return table


def _by_length(result: EvaluationResult, scores: Scores, width: int) -> Table:
    """Methods as rows, lengths as columns. The best of each column is green, lengths past the trained one yellow.

    Intervals are below the numbers if there is room for all of them.
    """
    lengths = scores.lengths()
    shown = _shown(lengths, result.trained_length)
    intervals = _intervals(scores, shown)
    has_effective = any(scores.effective_lengths)
    below = _fit_below(intervals, shown, result.names(), width - (GAP + len("effective length")) * has_effective)
    parts = [f"{scores.by}, tokens", f"trained length {result.trained_length:,}", _note(scores, intervals, below=below)]
    by_ratio = ratio_note(scores) if below else ""
    table = _new(*parts, by_ratio, *result.cautions(), _left_out(lengths, shown))
    _add_columns(table, result.names(), shown, result.trained_length)
    if has_effective:
        table.add_column("effective length", justify="right")
    best = {n: scores.best_at(n) for n in shown}
    texts = {
        (row, n): _cell(by[n], scores, is_best=row in best[n])
        for row, by in enumerate(scores.by_method)
        for n in shown
        if n in by
    }
    for row, name in enumerate(result.names()):
        cells = _cells(row, shown, texts, intervals if below else {})
        if has_effective:
            effective = scores.effective_lengths[row]
            cells.append(Text(f"{effective:,}" if effective else "-"))
        table.add_row(Text(in_cell(name)), *cells)
    return table


def _shown(lengths: Sequence[int], trained_length: int) -> list[int]:
    """All lengths, or some where they are many."""
    return spaced(lengths, trained_length, MOST_COLUMNS) if len(lengths) > MOST_COLUMNS else list(lengths)


def _left_out(lengths: Sequence[int], shown: Sequence[int]) -> str:
    left_out = len(lengths) - len(shown)
    return f"{left_out} more measured" if left_out else ""


def _fit_below(intervals: Cells[str], shown: Sequence[int], names: Sequence[str], width: int) -> bool:
    """True if ``width`` characters suffice for a name, and for an interval of each length."""
    if not intervals:
        return False
    widest = max(map(len, intervals.values()))
    return EDGES + _name_width(names) + len(shown) * (GAP + widest) <= width


def _name_width(names: Sequence[str]) -> int:
    """Least characters of a column of names whose words stay whole, unless they are long."""
    return max(NAME_WIDTH, *(min(len(word), WIDEST_WORD) for name in names for word in name.split()))


def _add_columns(table: Table, names: Sequence[str], shown: Sequence[int], trained_length: int) -> None:
    """Add those of methods and of lengths."""
    table.add_column("method", overflow="fold", min_width=_name_width(names))
    for length in shown:
        style = "bold" if length <= trained_length else "bold yellow"
        table.add_column(Text(f"{length:,}", style=style), justify="right", no_wrap=True)


def _cells(row: int, shown: Sequence[int], texts: Cells[Text], intervals: Cells[str]) -> list[Text]:
    """The cells of a row, with ``intervals`` below the texts if there are any."""
    cells = [texts.get((row, n), Text("")) for n in shown]
    if not intervals:
        return cells
    return [cell.append(f"\n{intervals.get((row, n), '')}", "dim") for cell, n in zip(cells, shown, strict=True)]


def _cell(score: Score, scores: Scores, *, is_best: bool) -> Text:
    text = short_number(score.value) if scores.lower_is_better else f"{score.value:.2f}"
    return Text(text, style=BEST if is_best else "")


def _intervals(scores: Scores, shown: Sequence[int]) -> Cells[str]:
    """The interval of every cell that has one, by method and length."""
    scored = ((row, n, by[n].interval) for row, by in enumerate(scores.by_method) for n in shown if n in by)
    return {(row, n): f"[{_end(at.low)}, {_end(at.high)}]" for row, n, at in scored if at is not None}


def _end(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 1000 else short_number(value)


def _note(scores: Scores, intervals: Cells[str], *, below: bool) -> str:
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
        table.add_row(Text(in_cell(name), style=BEST if index in overview.best else ""), *map(Text, cells))
    return table


def _new(*caption: str) -> Table:
    """An empty table with the caption's parts in one line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption = Text(in_cell("; ".join(filter(None, caption))))
    return table
