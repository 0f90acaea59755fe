"""Queries and new keys as sums read them: turned for each part of a reading, and into rings.

Those of several steps are made at once. Between two layers, the caches of a core have forgotten the code, and each step
would take as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from patches.attention.decode.reading import Reading
from patches.attention.decode.sums.columns import Member, first_rows
from patches.attention.decode.sums.rings import Ring
from patches.attention.decode.tables import Table
from patches.encoding.rotary import turn_


class Changes(NamedTuple):
    """Memory for ``queries`` [rows, head_dim], by their ``numbers`` in the step, with their ``factor`` [rows, 1].

    ``new`` keys [n, head_dim] are behind them. They come from the rows ``written`` of the cache, and turn to its rows
    ``kept``. The ``rotation`` is that of the ``turning`` ones, with new keys. A field is None without it.
    """

    queries: torch.Tensor
    numbers: torch.Tensor
    factor: torch.Tensor | None
    turning: torch.Tensor
    rotation: Table | None
    new: torch.Tensor
    written: torch.Tensor
    kept: torch.Tensor

    def applied(self, query: torch.Tensor, cached: torch.Tensor, *, interleaved: bool, offset: int) -> torch.Tensor:
        """The changed ones of ``query`` [all rows, head_dim]. New keys turn within ``cached`` [all rows, head_dim]."""
        torch.index_select(query, 0, self.numbers, out=self.queries)
        if self.factor is not None:
            self.queries.mul_(self.factor)
        if len(self.new):
            torch.index_select(cached, 0, self.written, out=self.new)
        if self.rotation is not None:
            turn_(self.turning, *self.rotation, interleaved=interleaved, offset=offset)
        if len(self.new):
            cached.index_copy_(0, self.kept, self.new)
        return self.queries


class Kept(NamedTuple):
    """The keys in a ``ring`` after each of several steps, by ``positions``.

    ``new`` ones, as many in each step, turn by the ``table`` [steps, keys, rotary_dim], from the ``written`` places
    [steps, keys].
    """

    ring: Ring
    positions: list[range]
    new: list[range]
    written: np.ndarray
    table: tuple[np.ndarray, np.ndarray]

    @property
    def places(self) -> np.ndarray:
        """The places [steps, keys] of new ones in the ring."""
        return np.stack([self.ring.places(new) for new in self.new])


def kept_of(members: Iterable[Member]) -> tuple[list[Kept], list[Kept]]:
    """The keys that members have in each of their rings, after their step and after those ahead."""
    now, ahead = list[Kept](), list[Kept]()
    for member in members:
        for number, ring in member.rings.items():
            once = [reading.parts[number].once for reading in (member.reading, *member.ahead)]
            positions = [turning.positions for turning in once if turning is not None]
            now.append(_kept(member, number, positions[:1], [ring.written(positions[0])]))
            if len(positions) > 1:
                ahead.append(_kept(member, number, positions[1:], [each[-1:] for each in positions[1:]]))
    return now, ahead


def _kept(member: Member, number: int, positions: list[range], new: list[range]) -> Kept:
    """Of the ring of a part, whose ``new`` keys of a step are as many as of another.

    Those behind the positions are copies of the last key.
    """
    turning = member.reading.parts[number].once
    assert turning is not None, "keys that turn once have rings"
    every = range(new[0].start, positions[-1].stop)
    column = member.spans_now[number].stop - turning.positions.stop
    runs = member.places_of(range(every.start + column, every.stop + column))
    places, (cos, sin) = np.concatenate([np.arange(run.start, run.stop) for run in runs]), turning.table(every)
    own = np.minimum(np.array(new), every[-1]) - every.start
    return Kept(member.rings[number], positions, new, places[own], (cos.numpy()[own], sin.numpy()[own]))


def changes_of(
    members: Sequence[Member],
    kept: tuple[Sequence[Kept], Sequence[Kept]],
    sequences: int,
    heads: int,
    cached: Sequence[int],
) -> list[Changes | None]:
    """The changes of the members' step and of those ahead, in which rings get the keys that they have ``kept``.

    The cache has the shape ``cached``: key heads, places and head_dim.
    """
    numbers, turns = [member.number for member in members], [len(member.reading.queries) for member in members]
    is_everyone = numbers == list(range(sequences)) and max(turns) == 1
    rows = np.repeat(np.array(numbers)[:, None] * heads + np.arange(heads), np.repeat(turns, heads))
    queries = None if is_everyone else torch.from_numpy(rows)
    now, ahead = [[member.reading] for member in members], [member.ahead for member in members]
    changes = _changes(now, kept[0], queries, heads, cached)
    return changes + _changes(ahead, kept[1], queries, heads, cached) if ahead[0] else changes


def _changes(
    readings: Sequence[Sequence[Reading]],
    kept: Sequence[Kept],
    numbers: torch.Tensor | None,
    heads: int,
    cached: Sequence[int],
) -> list[Changes | None]:
    """The changes of each step, of members with ``readings`` by step."""
    steps = range(len(readings[0]))
    factors, (first, rotations) = _factors(readings, heads), _rotations(readings, kept, heads, cached[0])
    if numbers is None and factors is None and rotations is None:
        return [None for _ in steps]
    if numbers is None:
        numbers = torch.arange(heads * len(readings))
    written, turned = (_rows(places, cached) for places in ([k.written for k in kept], [k.places for k in kept]))
    edge = len(numbers)
    whole = torch.empty(edge + written.shape[1], cached[2], dtype=torch.float32)
    return [
        Changes(
            whole[:edge],
            numbers,
            None if factors is None else factors[step],
            whole[first:],
            None if rotations is None else (rotations[0][step], rotations[1][step]),
            whole[edge:],
            written[step if kept else 0],
            turned[step if kept else 0],
        )
        for step in steps
    ]


def _factors(readings: Sequence[Sequence[Reading]], heads: int) -> torch.Tensor | None:
    """[steps, rows, 1]."""
    if all(each.factor is None and each.multiplier == 1.0 for own in readings for each in own[:1]):
        return None
    factors = [
        [each.multiplier * (1.0 if each.factor is None else float(each.factor)) for each in own] for own in readings
    ]
    rows = [heads * len(own[0].queries) for own in readings]
    return torch.from_numpy(np.repeat(np.array(factors, np.float32).T, rows, 1))[..., None]


def _rows(places: Sequence[np.ndarray], cached: Sequence[int]) -> torch.Tensor:
    """Rows int64 [steps, n] of a cache at ``places`` [steps, keys] of each key head, in the order of ``places``."""
    if not places:
        return torch.empty(1, 0, dtype=torch.int64)
    firsts = first_rows(cached[0], (cached[0], cached[1]))
    rows = [(firsts + own[:, None]).reshape(len(own), -1) for own in places]
    return torch.from_numpy(np.concatenate(rows, 1))


def _rotations(
    readings: Sequence[Sequence[Reading]], kept: Sequence[Kept], heads: int, kv_heads: int
) -> tuple[int, Table | None]:
    """The number of the first query that turns, and rotations [steps, rows, rotary_dim] from it on.

    A query that does not turn has a rotation by nothing. Those of new keys are the last rows.
    """
    cosines, sines, rows = list[np.ndarray](), list[np.ndarray](), list[int]()
    for own in readings:
        numbers = []
        for part in own[0].firsts:
            tables = [table for each in own if (table := each.parts[part].query) is not None]
            numbers.append(len(cosines) + 1 if tables else 0)
            if tables:
                cosines.append(np.concatenate([cos.numpy() for cos, _ in tables])[:, None])
                sines.append(np.concatenate([sin.numpy() for _, sin in tables])[:, None])
        rows += numbers * heads
    count = 1 + len(cosines)
    cosines += [each.table[0] for each in kept]
    sines += [each.table[1] for each in kept]
    if not cosines:
        return 0, None
    for each in kept:
        keys = each.table[0].shape[1]
        rows += [*range(count, count + keys)] * kv_heads
        count += keys
    first = next(number for number, row in enumerate(rows) if row)
    still = np.ones_like(cosines[0][:, :1]), np.zeros_like(sines[0][:, :1])
    whole = np.concatenate((still[0], *cosines), 1), np.concatenate((still[1], *sines), 1)
    return first, (torch.from_numpy(whole[0][:, rows[first:]]), torch.from_numpy(whole[1][:, rows[first:]]))
