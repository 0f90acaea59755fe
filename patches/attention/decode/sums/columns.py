"""The rows of a cache that each head of a query reads: those of its keys, and of its values.

Rows are those of all key heads, one head after another. Keys that turn are read in spare places or in rings, and their
values at their own. Columns have room for the keys of further steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from patches.attention.decode.reading import ORDINARY, Reading
from patches.attention.decode.sums.rings import Ring
from patches.attention.decode.tables import Table
from patches.batch.segments import part_of

TOGETHER = 256
"""Keys of several sequences that turn in one call. Each call costs as much as 50 keys, and more of them do not fit into
a core's own cache. Those of one sequence are never divided."""

Piece = tuple[list[range], Table]
"""The places of keys that turn by a table."""


class Member(NamedTuple):
    """A sequence by its number in the step. Its ``length`` keys, and those of the steps ``ahead``, lie in ``runs`` of
    the cache.

    ``rings`` are those of keys that turn once, by part of the reading.
    """

    number: int
    reading: Reading
    length: int
    runs: Sequence[range]
    rings: Mapping[int, Ring] = {}
    ahead: Sequence[Reading] = ()

    @property
    def is_ordinary(self) -> bool:
        """True if it reads all keys, which it then does in the steps ahead too."""
        return self.reading is ORDINARY

    @property
    def turned_keys(self) -> int:
        """The number of keys that turn without a ring."""
        if not self.rings:
            return self.reading.turned_keys
        in_rings = sum(len(span) for number, span in enumerate(self.spans_now) if number in self.rings)
        return self.reading.turned_keys - in_rings

    @property
    def spans_now(self) -> list[range]:
        """The keys that each part reads."""
        return [range(self.length)[part.columns] for part in self.reading.parts]

    @property
    def spans(self) -> list[range]:
        """The keys that each part reads, with those that it may read in the steps ahead."""
        return [range(span.start, span.stop + len(self.ahead)) for span in self.spans_now]

    def places_of(self, keys: range) -> list[range]:
        """Runs of the cache that have ``keys``."""
        return list(part_of(self.runs, keys))


class TurnedKeys(NamedTuple):
    """Keys at the places ``source``, int64 [n] or a slice, are read in ``spare`` ones instead, turned by
    ``rotation``."""

    source: slice | torch.Tensor
    spare: slice
    rotation: Table


class Keys(NamedTuple):
    """Keys of one sequence by the turns of its query, each of which reads ``sizes`` of them.

    ``parts`` of the reading are in this order, each from a column on, and all of their ``runs`` in the cache too. Some
    of these keys are ``turned`` by a table. Others are read at the places of a ring.
    """

    sizes: list[int]
    parts: list[tuple[int, int]]
    runs: list[range]
    turned: list[tuple[slice, Table]]
    in_rings: list[tuple[slice, np.ndarray]]

    @classmethod
    def of(cls, member: Member) -> Keys:
        if member.is_ordinary:
            length = member.length + len(member.ahead)
            return cls([length], [(0, 0)], member.places_of(range(length)), [], [])
        own, spans, turns = cls([], [], [], [], []), member.spans, member.reading.turns
        column = 0
        for turn in range(1 + max(turns)):
            first = column
            for number in (number for number, each in enumerate(turns) if each == turn):
                part, span, ring = member.reading.parts[number], spans[number], member.rings.get(number)
                own.parts.append((number, column))
                own.runs.extend(member.places_of(span))
                if ring is not None and part.once is not None:
                    start = part.once.positions.start
                    places = ring.places(range(start, start + len(span)))
                    own.in_rings.append((slice(column, column + len(span)), places))
                else:
                    own.turned.extend((slice(column + each.start, column + each.stop), by) for each, by in part.keys)
                column += len(span)
            own.sizes.append(column - first)
        return own


def columns_of(own: Sequence[Keys], heads: int, cached: tuple[int, int], integer: Any) -> np.ndarray:
    """Rows of a cache of (kv_heads, places): for each head of each sequence, its keys by run."""
    firsts = first_rows(heads, cached).astype(integer)
    columns: np.ndarray = np.empty(heads * sum(sum(each.sizes) for each in own), integer)
    stop = 0
    for each in own:
        runs = [np.arange(run.start, run.stop, dtype=integer) for run in each.runs]
        keys = runs[0] if len(runs) == 1 else np.concatenate(runs)
        start, stop = stop, stop + heads * len(keys)
        np.add(firsts, keys, out=columns[start:stop].reshape(heads, -1))
    return columns


def first_rows(heads: int, cached: tuple[int, int]) -> np.ndarray:
    """The first row [heads, 1] of each query head's keys in a cache of (kv_heads, places)."""
    kv_heads, places = cached
    return np.arange(heads)[:, None] * kv_heads // heads * places


def with_turned(
    own: Sequence[Keys], values: np.ndarray, heads: int, cached: tuple[int, int], spare: int
) -> tuple[torch.Tensor, list[TurnedKeys]]:
    """The columns of keys with ``values`` there. Keys that turn are from the place ``spare`` on, or in rings."""
    if not any(each.turned or each.in_rings for each in own):
        return torch.from_numpy(values), []
    columns, firsts, place, stop = values.copy(), first_rows(heads, cached), spare, 0
    pieces: list[Piece] = []
    for each in own:
        start, stop = stop, stop + heads * sum(each.sizes)
        by_head = columns[start:stop].reshape(heads, -1)
        for piece, table in each.turned:
            first, place = place, place + piece.stop - piece.start
            by_head[:, piece] = firsts + np.arange(first, place)
            pieces.append((list(part_of(each.runs, range(piece.start, piece.stop))), table))
        for piece, places in each.in_rings:
            by_head[:, piece] = firsts + places
    return torch.from_numpy(columns), list(_gathered(pieces, spare)) if pieces else []


def _gathered(pieces: Sequence[Piece], spare: int) -> Iterator[TurnedKeys]:
    """``pieces``, small ones together, in places from ``spare`` on."""
    together: list[Piece] = []
    for piece in pieces:
        if together and _keys(together) + _keys([piece]) > TOGETHER:
            yield _one(together, spare)
            spare, together = spare + _keys(together), []
        together.append(piece)
    yield _one(together, spare)


def _keys(pieces: Sequence[Piece]) -> int:
    return sum(len(run) for runs, _ in pieces for run in runs)


def _one(pieces: Sequence[Piece], spare: int) -> TurnedKeys:
    """Neighbours in the cache are a slice, which nothing needs to copy."""
    runs = [run for runs, _ in pieces for run in runs]
    if len(runs) == 1:
        source: slice | torch.Tensor = slice(runs[0].start, runs[0].stop)
    else:
        source = torch.from_numpy(np.concatenate([np.arange(run.start, run.stop) for run in runs]))
    tables = [table for _, table in pieces]
    rotation = tables[0] if len(tables) == 1 else (torch.cat([t[0] for t in tables]), torch.cat([t[1] for t in tables]))
    return TurnedKeys(source, slice(spare, spare + _keys(pieces)), rotation)


def edges(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """The first number of each of ``counts``, and the end of the last."""
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges
