"""A result's numbers as tables of text: the main ones by method and length, and every one there is."""

from __future__ import annotations

from typing import NamedTuple

from service.evaluation.comparison.within import changes_of
from service.evaluation.results import EvaluationResult
from service.evaluation.scores import Beside, Changes, Score, Scores
from service.evaluation.statistics.separation import ratio_note
from service.figures.drawing.axes import spread

MOST_COLUMNS = 16
"""Of a table by method and length."""


class Cell(NamedTuple):
    """A number, its 95 % interval below it, and whether it is the best of its column."""

    text: str
    interval: str = ""
    is_best: bool = False


class Table(NamedTuple):
    """``rows`` begin with a name; cells follow, one per further column."""

    caption: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


class AllNumbers(NamedTuple):
    """The first rows as a table, and how many there are."""

    table: Table
    rows: int


def summaries(result: EvaluationResult) -> list[Table]:
    """The main numbers by method and length, then those beside partners; of a sweep, one table per part. Of many
    lengths some are shown."""
    changes = changes_of(result)
    beside = [] if changes is None else [_beside(changes)]
    return [*(_summary(part, result.scope()) for part in result.parts()), *beside]


def intervals_note(result: EvaluationResult) -> str:
    """The sentence on the intervals below the numbers."""
    by_ratio = next(filter(None, (ratio_note(part.scores()) for part in result.parts())), "")
    return f"Below the numbers: 95 % intervals.{by_ratio and f' {by_ratio}.'}"


def columns_left_out(result: EvaluationResult) -> str:
    """A sentence on the columns that ``summaries`` leave out; nothing where all are there."""
    counts = [len(part.scores().lengths()) for part in result.parts()]
    if max(counts) <= MOST_COLUMNS:
        return ""
    return f"{MOST_COLUMNS} of {max(counts):,} columns are shown, at equal steps."


def all_numbers(result: EvaluationResult, most: int) -> AllNumbers:
    """The first ``most`` rows of the result, in full precision."""
    rows = result.rows()
    names = list(rows[0]) if rows else []
    cells = [[Cell(exact(row[name])) for name in names] for row in rows[:most]]
    table = Table("Every number", names, [(line[0].text, line[1:]) for line in cells if line])
    return AllNumbers(table, len(rows))


def exact(value: object) -> str:
    """A value without loss."""
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _summary(result: EvaluationResult, scope: str) -> Table:
    scores = result.scores()
    lengths = spread(scores.lengths(), MOST_COLUMNS)
    best = {n: scores.best_at(n) for n in lengths}
    rows = [
        (name, [_cell(by_length.get(n), scores, is_best=row in best[n]) for n in lengths])
        for row, (name, by_length) in enumerate(zip(result.names(), scores.by_method, strict=True))
    ]
    better = "lower is better" if scores.lower_is_better else "higher is better"
    caption = f"{scores.title} by {scores.by}, tokens ({better}){scope and f', {scope}'}"
    return Table(caption, ["method", *(f"{length:,}" for length in lengths)], rows)


def _beside(changes: Changes) -> Table:
    lengths = spread(changes.lengths(), MOST_COLUMNS)
    rows = [
        (name, [_beside_cell(by_length.get(n)) for n in lengths])
        for name, by_length in zip(changes.names, changes.by_method, strict=True)
    ]
    return Table(f"{changes.title} ({changes.mark})", ["method", *(f"{length:,}" for length in lengths)], rows)


def _beside_cell(at: Beside | None) -> Cell:
    if at is None:
        return Cell("")
    return Cell(at.marked, " to ".join(at.interval or ()))


def _cell(score: Score | None, scores: Scores, *, is_best: bool) -> Cell:
    if score is None:
        return Cell("")
    interval = f"{scores.text(score.interval.low)} to {scores.text(score.interval.high)}" if score.interval else ""
    return Cell(scores.text(score.value), interval, is_best)
