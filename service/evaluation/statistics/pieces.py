"""The groups of a result to take as independent: batch means (Schmeiser 1982, Operations Research 30, p. 556-568).

Text drifts for thousands of tokens. So 10 to 30 batches, or an autocorrelation-consistent error, cover real text less
often than few batches do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from service.evaluation.scores import Group

LEAST = 3
"""Values of an interval, and of a probability: the interval of two is 13 standard errors to each side."""

PARTS = 4
"""Pieces of a single document."""


def pieces_of(groups: Sequence[Group], documents: int) -> list[Group]:
    """The groups of documents, or the blocks of the only one joined to four quarters.

    Groups without tokens are left out. Fewer than eight blocks are joined to thirds: a short piece varies little.
    """
    pieces = [group for group in groups if group[1]]
    if documents > 1 or len(pieces) <= LEAST:
        return pieces
    parts = PARTS if len(pieces) >= 2 * PARTS else LEAST
    size, larger = divmod(len(pieces), parts)
    edges = pairwise(part * size + min(part, larger) for part in range(parts + 1))
    return [_joined(pieces[start:stop]) for start, stop in edges]


def _joined(groups: Sequence[Group]) -> Group:
    return sum(total for total, _ in groups), sum(tokens for _, tokens in groups)
