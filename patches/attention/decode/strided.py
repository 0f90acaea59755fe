"""New queries of several sequences in one call, where their keys lie at equal distances in the cache.

Over a few hundred keys, a call takes longer than its mathematics, most of all on several threads. At equal distances,
the keys of many sequences are one tensor with a stride. So no key is copied, unless it turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from patches.attention.decode.reading import EVERY, FEW, ORDINARY, Reading
from patches.attention.decode.tables import Table, ends
from patches.attention.log_sum_exp import merged, sdpa_with_lse
from patches.encoding.rotary import turn, turn_into, upcast

ALIKE = 64
"""Sequences of one call have fewer keys than the longest by less than this. Another call takes as long as reading so
many."""


class StridedBatch(NamedTuple):
    """Sequences, by their number in the step. From one to the next, first keys are ``stride`` places apart.

    Each query attends once for every one of ``turns``: it turns by ``query`` [sequences, turns, 1, rotary_dim]. The
    ``bias`` [sequences, kv_heads or 1, turns x heads of each, length] excludes keys of other turns. It also excludes
    those behind a sequence's last. Some of the ``length`` keys turn by ``keys`` [sequences, 1, keys, rotary_dim]. The
    table may go on behind the last key. It then turns the queries of each key head too, by the same operations. The
    query has the ``factor`` [sequences, 1, 1]. Without one of these, its field is None. ``rows`` are the members, or
    None if they are all sequences in their order. ``multiplier`` is that of the scores.
    """

    members: list[int]
    first: int
    stride: int
    length: int
    rows: torch.Tensor | None
    turns: int = 1
    bias: torch.Tensor | None = None
    query: Table | None = None
    keys: tuple[slice, Table] | None = None
    factor: torch.Tensor | None = None
    multiplier: float = 1.0
    interleaved: bool = False
    offset: int = 0


def strided_batches(
    readings: Sequence[Reading | None],
    places: Sequence[range | None],
    lengths: Sequence[int],
    query: torch.Tensor,
    kv_heads: int,
) -> list[StridedBatch]:
    """Batches of two sequences at least, of those with a reading and a place. The others are in none.

    ``places`` are the places in the cache that each sequence may read, from its first key on. ``lengths`` are its
    numbers of keys. Of ``query`` [1, heads, sequences, head_dim], only shape and dtype count.
    """
    kinds: dict[Kind, list[Candidate]] = {}
    for number, (reading, place, length) in enumerate(zip(readings, places, lengths, strict=True)):
        if reading is None or place is None or (length > FEW and reading is not ORDINARY):
            continue
        kinds.setdefault(_kind(reading), []).append(Candidate(length, place, number, reading))
    found = (part for candidates in kinds.values() for part in _equally_spaced(candidates))
    return [_Stacked(part, query, kv_heads).batch() for part in found]


Kind = tuple[tuple[int, ...], bool, float]
"""Turns of the query, whether keys turn, and the multiplier: alike in all sequences of a call."""

PLAIN: Kind = (0,), False, 1.0


def _kind(reading: Reading) -> Kind:
    if reading is ORDINARY:
        return PLAIN
    return tuple(reading.turns), reading.turned_keys > 0, reading.multiplier


class Candidate(NamedTuple):
    """A sequence that may share a call."""

    length: int
    place: range
    number: int
    reading: Reading


def strided_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, batch: StridedBatch
) -> torch.Tensor:
    """Output [1, sequences, heads, value dim] of the members' queries in ``query`` [1, heads, all sequences, head_dim].

    ``keys`` and ``values`` [kv_heads, places, dim] are a layer's whole cache. Heads that share a key head are its
    queries: a single one needs no causal mask.
    """
    members, heads, kv_heads, turns = len(batch.members), query.shape[1], keys.shape[0], batch.turns
    query = query.transpose(1, 2)
    if batch.rows is not None:
        query = query.index_select(1, batch.rows)
    if batch.factor is not None:
        query = (query * batch.factor).to(query.dtype)
    key, value = _strided(keys, batch), _strided(values, batch)
    if batch.keys is not None:
        columns, table = batch.keys
        turns_query = columns.stop > batch.length
        queries = query.reshape(members, kv_heads, -1, query.shape[-1])
        states = torch.cat((key, queries), 2) if turns_query else key.clone()
        own = states[:, :, columns]
        turn_into(own, own, *table, interleaved=batch.interleaved, offset=batch.offset)
        key, query = states[:, :, : batch.length], states[:, :, batch.length :] if turns_query else query
    if batch.query is not None:
        query = query.reshape(members, 1, heads, -1).expand(-1, turns, -1, -1)
        query = turn(query, *batch.query, interleaved=batch.interleaved, offset=batch.offset)
        query = query.view(members, turns, kv_heads, -1, query.shape[-1]).transpose(1, 2)
    query, scaling = query.reshape(members, kv_heads, -1, query.shape[-1]), scaling * batch.multiplier
    if turns == 1:
        out = F.scaled_dot_product_attention(query, key, value, batch.bias, scale=scaling)
    else:
        each = sdpa_with_lse(query, key, value, batch.bias, scaling)
        outs, sums = (states.unflatten(2, (turns, -1)).unbind(2) for states in each)
        out = reduce(merged, zip(outs, sums, strict=True))[0].to(query.dtype)
    return out.reshape(1, members, heads, -1)


def _strided(states: torch.Tensor, batch: StridedBatch) -> torch.Tensor:
    """[sequences, kv_heads, length, dim] in the cache ``states`` [kv_heads, places, dim]."""
    head, place, one = states.stride()
    size = len(batch.members), states.shape[0], batch.length, states.shape[2]
    first = states.storage_offset() + batch.first * place
    return states.as_strided(size, (batch.stride * place, head, place, one), first)


class _Stacked:
    """Readings whose parts have like turns, as one: their tables and biases side by side."""

    def __init__(self, sequences: list[Candidate], query: torch.Tensor, kv_heads: int) -> None:
        self._sequences, self._query, self._kv_heads = sequences, query, kv_heads
        self._readings = [sequence.reading for sequence in sequences]
        self._lengths = [sequence.length for sequence in sequences]
        self._turns = self._readings[0].turns
        self._count = 1 + max(self._turns)

    def batch(self) -> StridedBatch:
        one = next((reading for reading in self._readings if reading is not ORDINARY), ORDINARY)
        first, second = (sequence.place.start for sequence in self._sequences[:2])
        members, length = [sequence.number for sequence in self._sequences], max(self._lengths)
        is_whole, keys = members == list(range(self._query.shape[2])), self._keys(length)
        turns_apart = keys is None or keys[0].stop <= length
        return StridedBatch(
            members, first, second - first, length, None if is_whole else torch.tensor(members), self._count,
            self._bias(length), self._queries() if turns_apart else None, keys, self._factor(), one.multiplier,
            one.interleaved, one.offset,
        )  # fmt: skip

    def _columns(self) -> list[list[tuple[int, int]]]:
        """(first, end) of the keys of each part of each sequence."""
        return [
            [
                (0, length) if part.columns == EVERY else (part.columns.start, part.columns.stop)
                for part in reading.parts
            ]
            for reading, length in zip(self._readings, self._lengths, strict=True)
        ]

    def _bias(self, length: int) -> torch.Tensor | None:
        columns, turns, dtype = self._columns(), self._turns, self._query.dtype
        biased = [
            (number, index, part.bias)
            for number, reading in enumerate(self._readings)
            for index, part in enumerate(reading.parts)
            if part.bias is not None
        ]
        if not biased and self._count == 1 and all(map(_is_everything, columns, self._lengths)):
            return ends(tuple(length - own for own in self._lengths), length, dtype)
        kv_heads = self._kv_heads if biased else 1  # without biases, one row of heads serves all
        heads = self._query.shape[1] * kv_heads // self._kv_heads
        # By numpy: so small operations take torch five times as long.
        numbers = np.float64 if dtype == torch.float64 else np.float32
        bias = np.full((len(columns), self._count, heads, length), torch.finfo(dtype).min, numbers)
        for number, parts in enumerate(columns):
            for index, (first, end) in zip(turns, parts, strict=True):
                bias[number, index, :, first:end] = 0.0
        for number, index, own in biased:
            first, end = columns[number][index]
            bias[number, turns[index], :, first:end] = upcast(own[0, :, 0]).numpy()
        grouped = bias.reshape(len(columns), self._count, kv_heads, -1, length).swapaxes(1, 2)
        return torch.from_numpy(grouped.reshape(len(columns), kv_heads, -1, length)).to(dtype)

    def _queries(self) -> Table | None:
        firsts = [self._turns.index(turn) for turn in range(self._count)]
        tables = [reading.parts[first].query for reading in self._readings for first in firsts]
        if not any(tables):
            return None
        cos, sin = _tables([[] if table is None else [(0, table)] for table in tables], 1)
        size = len(self._readings), self._count, 1, -1
        return cos.view(size), sin.view(size)

    def _keys(self, length: int) -> tuple[slice, Table] | None:
        pieces = [
            [
                (first + piece.start, table)
                for (first, _), part in zip(columns, reading.parts, strict=True)
                for piece, table in part.keys
            ]
            for columns, reading in zip(self._columns(), self._readings, strict=True)
        ]
        spans = [(start, start + len(table[0])) for own in pieces for start, table in own]
        if not spans:
            return None
        if self._count == 1 and any(reading.parts[0].query for reading in self._readings):
            queries = range(length, length + self._query.shape[1] // self._kv_heads)
            for own, reading in zip(pieces, self._readings, strict=True):
                table = reading.parts[0].query
                own += [(row, table) for row in queries if table is not None]
            spans.append((queries.start, queries.stop))
        low, high = min(start for start, _ in spans), max(stop for _, stop in spans)
        cos, sin = _tables([[(start - low, table) for start, table in own] for own in pieces], high - low)
        return slice(low, high), (cos[:, None], sin[:, None])

    def _factor(self) -> torch.Tensor | None:
        if all(reading.factor is None for reading in self._readings):
            return None
        factors = torch.ones(len(self._readings), 1, 1, dtype=torch.float32)
        for number, reading in enumerate(self._readings):
            if reading.factor is not None:
                factors[number] = reading.factor
        return factors


def _tables(pieces: list[list[tuple[int, Table]]], rows: int) -> Table:
    """Rotations [sequences, rows, rotary_dim]: ``pieces`` from their first rows on, by nothing elsewhere."""
    width = next(table[0].shape[-1] for own in pieces for _, table in own)
    cos, sin = np.ones((len(pieces), rows, width), np.float32), np.zeros((len(pieces), rows, width), np.float32)
    for number, own in enumerate(pieces):
        for start, table in own:
            for whole, piece in zip((cos, sin), table, strict=True):
                whole[number, start : start + len(piece)] = piece.numpy()
    return torch.from_numpy(cos), torch.from_numpy(sin)


def _is_everything(parts: Sequence[tuple[int, int]], length: int) -> bool:
    """True if ``parts``, by their columns, have each of ``length`` keys."""
    stop = 0
    for first, end in parts:
        if first > stop:
            return False
        stop = end
    return stop == length


def _equally_spaced(candidates: list[Candidate]) -> list[list[Candidate]]:
    """Parts of two ``candidates`` at least, of like lengths, with equal distances between their places.

    Like lengths first, or neighbours first: whichever leaves fewer calls.
    """
    groups: list[list[Candidate]] = []
    for candidate in sorted(candidates, key=lambda candidate: -candidate.length):
        if not groups or groups[-1][0].length - candidate.length >= ALIKE:
            groups.append([])
        groups[-1].append(candidate)
    ways = [part for group in groups for part in _parts(group)], list(_parts(candidates))
    return [part for part in min(ways, key=len) if len(part) > 1]


def _parts(group: list[Candidate]) -> Iterator[list[Candidate]]:
    """Parts of a ``group`` in the order of their places.

    The next sequence has the distance of those before and about their length. Each may read as many keys as the
    longest has.
    """
    part: list[Candidate] = []
    shortest = longest = room = 0
    for one in sorted(group, key=lambda candidate: candidate.place.start):
        before = [candidate.place.start for candidate in part[-2:]]
        is_spaced = len(before) < 2 or one.place.start - before[1] == before[1] - before[0]
        lengths = min(shortest, one.length), max(longest, one.length)
        if part and is_spaced and lengths[1] - lengths[0] < ALIKE and lengths[1] <= min(room, len(one.place)):
            (shortest, longest), room = lengths, min(room, len(one.place))
        else:
            if part:
                yield part
            part, room = [], len(one.place)
            shortest = longest = one.length
        part.append(one)
    yield part
