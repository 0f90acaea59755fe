"""The rows of a cache that each head of a query reads: those of its keys, and of its values.

Rows are those of all key heads, one head after another. Keys that turn are read in spare places, and their values at
their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from patches.attention.decode.reading import EVERY, Part, Reading
from patches.attention.decode.tables import Table

TOGETHER = 256
"""Keys of several sequences that turn in one call. Each call costs as much as 50 keys, and more of them do not fit into
a core's own cache. Those of one sequence are never divided."""

Piece = tuple[list[range], Table]
"""The places of keys that turn by a table."""


class Member(NamedTuple):
    """A sequence by its number in the step. Its ``length`` keys lie in ``runs`` of the cache."""

    number: int
    reading: Reading
    length: int
    runs: Sequence[range]


class TurnedKeys(NamedTuple):
    """Keys at the places ``source``, int64 [n] or a slice, are read in ``spare`` ones instead, turned by
    ``rotation``."""

    source: slice | torch.Tensor
    spare: slice
    rotation: Table


class Keys(NamedTuple):
    """Keys of one sequence by the ``turns`` of its query, each of which reads ``sizes`` of them.

    Parts are in this order, with a number of keys each, and all of their ``runs`` in the cache too. Some of these keys
    are ``turned`` by a table.
    """

    turns: list[Table | None]
    sizes: list[int]
    parts: list[tuple[Part, int]]
    runs: list[range]
    turned: list[tuple[slice, Table]]

    @classmethod
    def of(cls, member: Member) -> Keys:
        parts, length = member.reading.parts, member.length
        if len(parts) == 1 and parts[0].columns == EVERY:
            return cls([parts[0].query], [length], [(parts[0], length)], list(member.runs), list(parts[0].keys))
        turns = {id(part.query): part.query for part in parts}
        ordered = [part for one in turns for part in parts if id(part.query) == one]
        spans = [range(length)[part.columns] for part in ordered]
        sizes = dict.fromkeys(turns, 0)
        turned, before = [], 0
        for part, span in zip(ordered, spans, strict=True):
            sizes[id(part.query)] += len(span)
            turned += [(slice(before + piece.start, before + piece.stop), table) for piece, table in part.keys]
            before += len(span)
        runs = [run for span in spans for run in _part_of(member.runs, span)]
        counted = list(zip(ordered, map(len, spans), strict=True))
        return cls([*turns.values()], [*sizes.values()], counted, runs, turned)


def _part_of(runs: Sequence[range], span: range) -> Iterator[range]:
    """The keys ``span`` of those in ``runs``."""
    first = 0
    for run in runs:
        part = run[max(0, span.start - first) : max(0, span.stop - first)]
        if part:
            yield part
        first += len(run)


def columns_of(own: Sequence[Keys], heads: int, cached: tuple[int, int], integer: Any) -> np.ndarray:
    """Rows of a cache of (kv_heads, places): for each head of each sequence, its keys by run."""
    firsts = _firsts(heads, cached).astype(integer)
    columns: np.ndarray = np.empty(heads * sum(sum(each.sizes) for each in own), integer)
    stop = 0
    for each in own:
        runs = [np.arange(run.start, run.stop, dtype=integer) for run in each.runs]
        keys = runs[0] if len(runs) == 1 else np.concatenate(runs)
        start, stop = stop, stop + heads * len(keys)
        np.add(firsts, keys, out=columns[start:stop].reshape(heads, -1))
    return columns


def _firsts(heads: int, cached: tuple[int, int]) -> np.ndarray:
    """The first row [heads, 1] of each query head's keys in a cache of (kv_heads, places)."""
    kv_heads, places = cached
    return np.arange(heads)[:, None] * kv_heads // heads * places


def with_turned(
    own: Sequence[Keys], values: np.ndarray, heads: int, cached: tuple[int, int], spare: int
) -> tuple[torch.Tensor, list[TurnedKeys]]:
    """The columns of keys whose values are at ``values``: those of keys that turn are from the place ``spare`` on."""
    if not any(each.turned for each in own):
        return torch.from_numpy(values), []
    columns, firsts, place, stop = values.copy(), _firsts(heads, cached), spare, 0
    pieces: list[Piece] = []
    for each in own:
        start, stop = stop, stop + heads * sum(each.sizes)
        by_head = columns[start:stop].reshape(heads, -1)
        for piece, table in each.turned:
            first, place = place, place + piece.stop - piece.start
            by_head[:, piece] = firsts + np.arange(first, place)
            pieces.append((list(_part_of(each.runs, range(piece.start, piece.stop))), table))
    return torch.from_numpy(columns), list(_gathered(pieces, spare))


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
