"""The cost of an evaluation, computed before any of its units exists."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Tokens that all passes read, the passes, and the units that they belong to."""

    tokens: int = 0
    passes: int = 0
    units: int = 0

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, count: int) -> Cost:
        return Cost(*(count * part for part in self))
