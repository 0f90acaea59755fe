"""The main numbers of a result, as tables, words and pictures show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel

from service.evaluation.formatting import percent, short_number

Group = tuple[float, int]
"""NLL summed over the scored tokens of a document or of a block, and their number."""


class Interval(BaseModel):
    """95 % interval of a number. ``kind`` says over what. By Student's t it is over documents, windows, or quarters of
    the scored tokens of the one document. By Wilson's interval of a proportion it is over samples. Results of earlier
    versions have ``blocks`` of 64 tokens: such an interval is too narrow."""

    low: float
    high: float
    kind: Literal["documents", "windows", "quarters", "blocks", "samples"]


ENDS: Mapping[str, type[float]] = {"interval_low": float, "interval_high": float}

INTERVAL: Mapping[str, type[float | str]] = {**ENDS, "interval_kind": str}


def interval_columns(interval: Interval | None, columns: Iterable[str] = INTERVAL) -> dict[str, float | str | None]:
    """The ``columns`` of an interval in a table, empty where there is none."""
    return {name: getattr(interval, name.removeprefix("interval_"), None) for name in columns}


ROUNDING = 1e-6
"""Relative difference of two numbers that rounding explains: one encoding by two routes differs by 1e-8 to 2e-7."""


def are_equal(a: float, b: float) -> bool:
    """True for numbers that are equal up to rounding."""
    return math.isclose(a, b, rel_tol=ROUNDING)


class Score(NamedTuple):
    """The main number of a method at a length. A perplexity has ``pieces`` to pair: documents, or quarters of one. A
    share has the scores of its ``samples``."""

    value: float
    interval: Interval | None
    pieces: list[Group] | None = None
    samples: Sequence[float] = ()


class Scores(NamedTuple):
    """The main numbers of a result. ``by_method`` maps length (or distance) to score, in the order of the methods.

    ``note`` describes the intervals. ``effective_lengths`` has one per method, and is empty where none are measured.
    """

    measure: str
    lower_is_better: bool
    by_method: Sequence[Mapping[int, Score]]
    by: Literal["context length", "distance"] = "context length"
    note: str = ""
    effective_lengths: Sequence[int | None] = ()

    @property
    def title(self) -> str:
        """The measure with a capital letter."""
        return self.measure[:1].upper() + self.measure[1:]

    def lengths(self) -> list[int]:
        """Every length of any method, ascending."""
        return sorted({length for by_length in self.by_method for length in by_length})

    def best_at(self, length: int) -> frozenset[int]:
        """Indices of the best methods at ``length``, equal up to rounding; none where all of several are equal."""
        values = {row: by_length[length].value for row, by_length in enumerate(self.by_method) if length in by_length}
        best = (min if self.lower_is_better else max)(values.values(), default=0.0)
        rows = frozenset(row for row, value in values.items() if are_equal(value, best))
        return frozenset() if len(rows) == len(values) > 1 else rows

    def text(self, value: float) -> str:
        """A value in few characters: a perplexity, or a share in percent."""
        return short_number(value) if self.lower_is_better else percent(value)


class Overview(NamedTuple):
    """A result without scores as a table of text. Each row begins with a method; ``best`` are indices of rows."""

    columns: list[str]
    rows: list[list[str]]
    best: frozenset[int]
    caption: str


class Beside(NamedTuple):
    """A number beside that of a partner, as text: with its 95 % interval, and whether the difference is sure."""

    text: str
    interval: tuple[str, str] | None
    is_sure: bool

    @property
    def marked(self) -> str:
        """The number, with a star if the difference is sure."""
        return f"{self.text}{'*' if self.is_sure else ''}"


class Changes(NamedTuple):
    """Numbers beside those of partners, by length. ``by_method`` has one mapping for each of ``names``; ``mark``
    explains the mark of sure ones."""

    title: str
    mark: str
    names: list[str]
    by_method: Sequence[Mapping[int, Beside]]

    def lengths(self) -> list[int]:
        """The lengths of any method, ascending."""
        return sorted({length for by_length in self.by_method for length in by_length})
