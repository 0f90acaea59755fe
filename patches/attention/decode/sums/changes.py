"""Queries and new keys as sums read them: turned for each part of a reading, and into rings.

Those of several steps are made at once. Between two layers, the caches of a core have forgotten the code, and each step
would take as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from patches.attention.decode.reading import ORDINARY, Reading
from patches.attention.decode.sums.columns import Member, first_rows
from patches.attention.decode.sums.rings import Ring
from patches.attention.decode.tables import Table
from patches.encoding.rotary import turn_into


@dataclass
class Rotations:
    """The rotations of rows in one of several steps: their ``numbers`` [rows] among all of the step.

    ``every`` has cos and sin [steps, rotations, rotary_dim]. Most rows share one with others of their step.
    """

    every: Table
    numbers: torch.Tensor
    table: Table = field(init=False)

    def __post_init__(self) -> None:
        cos, sin = (torch.empty(len(self.numbers), each.shape[-1], dtype=each.dtype) for each in self.every)
        self.table = cos, sin

    def begin(self, step: int) -> None:
        for each, own in zip(self.every, self.table, strict=True):
            torch.index_select(each[step], 0, self.numbers, out=own)


@dataclass
class Changes:
    """Memory for ``queries`` [rows, head_dim], by their ``numbers`` in the step, with ``factors`` [steps, rows, 1].

    ``new`` keys [n, head_dim] are behind them. They come from the rows ``written`` of the cache, and turn to its rows
    ``kept``, both [steps, n]. ``rotations`` are those of the ``turning`` ones, with new keys. Without any, the field is
    None.
    """

    queries: torch.Tensor
    numbers: torch.Tensor
    factors: torch.Tensor | None
    turning: torch.Tensor
    rotations: Rotations | None
    new: torch.Tensor
    written: torch.Tensor
    kept: torch.Tensor
    step: int = 0

    def begin(self, step: int) -> None:
        """Have the changes of a ``step``, counted from the first one of these."""
        self.step = step
        if self.rotations is not None:
            self.rotations.begin(step)

    def applied(self, query: torch.Tensor, cached: torch.Tensor, *, interleaved: bool, offset: int) -> torch.Tensor:
        """The changed ones of ``query`` [all rows, head_dim]. New keys turn within ``cached`` [all rows, head_dim]."""
        torch.index_select(query, 0, self.numbers, out=self.queries)
        if self.factors is not None:
            self.queries.mul_(self.factors[self.step])
        if len(self.new):
            torch.index_select(cached, 0, self.written[self.step], out=self.new)
        if self.rotations is not None:
            turn_into(self.turning, self.turning, *self.rotations.table, interleaved=interleaved, offset=offset)
        if len(self.new):
            cached.index_copy_(0, self.kept[self.step], self.new)
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


@dataclass
class Stretch:
    """Steps from ``first`` on with as many new keys each: their ``changes``, and the keys that rings have ``kept``."""

    first: int
    changes: Changes | None
    kept: list[Kept]

    def begin(self, step: int) -> None:
        """Have the changes of a ``step``, and the keys that rings have after it. All layers will end it."""
        for each in self.kept:
            each.ring.add(each.positions[step - self.first])
        if self.changes is not None:
            self.changes.begin(step - self.first)


def stretches_of(members: Sequence[Member], sequences: int, heads: int, cached: Sequence[int]) -> list[Stretch]:
    """The members' step and those ahead. Only in the first step, a ring may get several keys.

    The cache has the shape ``cached``: key heads, places and head_dim.
    """
    numbers, turns = [member.number for member in members], [len(member.reading.queries) for member in members]
    is_everyone = numbers == list(range(sequences)) and max(turns) == 1
    rows = np.repeat(np.array(numbers)[:, None] * heads + np.arange(heads), np.repeat(turns, heads))
    queries = None if is_everyone else torch.from_numpy(rows)
    every = [[member.reading, *member.ahead] for member in members]
    rings = [
        (member, number, ring, [turning.positions for each in readings if (turning := each.parts[number].once)])
        for member, readings in zip(members, every, strict=True)
        for number, ring in member.rings.items()
    ]
    steps, is_alike = len(every[0]), all(len(ring.written(positions[0])) == 1 for _, _, ring, positions in rings)
    stretches = []
    for start, stop in [(0, steps)] if is_alike or steps == 1 else [(0, 1), (1, steps)]:
        kept = []
        for member, number, ring, positions in rings:
            own = positions[start:stop]
            is_first_alone = stop == 1
            new = [ring.written(own[0])] if is_first_alone else [each[-1:] for each in own]
            kept.append(_kept(member, number, own, new))
        changes = _changes([readings[start:stop] for readings in every], kept, queries, heads, cached)
        stretches.append(Stretch(start, changes, kept))
    return stretches


def _changes(
    readings: Sequence[Sequence[Reading]],
    kept: Sequence[Kept],
    numbers: torch.Tensor | None,
    heads: int,
    cached: Sequence[int],
) -> Changes | None:
    """The changes of steps, of members with ``readings`` by step."""
    factors, (first, rotations) = _factors(readings, heads), _rotations(readings, kept, heads, cached[0])
    if numbers is None and factors is None and rotations is None:
        return None
    if numbers is None:
        numbers = torch.arange(heads * len(readings))
    steps, edge = len(readings[0]), len(numbers)
    written, turned = (_rows(places, cached, steps) for places in ([k.written for k in kept], [k.places for k in kept]))
    whole = torch.empty(edge + written.shape[1], cached[2], dtype=torch.float32)
    return Changes(whole[:edge], numbers, factors, whole[first:], rotations, whole[edge:], written, turned)


def _factors(readings: Sequence[Sequence[Reading]], heads: int) -> torch.Tensor | None:
    """[steps, rows, 1]."""
    if all(own[0].factor is None and own[0].multiplier == 1.0 for own in readings):
        return None
    factors = [
        [each.multiplier * (1.0 if each.factor is None else float(each.factor)) for each in own] for own in readings
    ]
    rows = [heads * len(own[0].queries) for own in readings]
    return torch.from_numpy(np.repeat(np.array(factors, np.float32).T, rows, 1))[..., None]


def _rows(places: Sequence[np.ndarray], cached: Sequence[int], steps: int) -> torch.Tensor:
    """Rows int64 [steps, n] of a cache at ``places`` [steps, keys] of each key head, in the order of ``places``."""
    if not places:
        return torch.empty(steps, 0, dtype=torch.int64)
    firsts = first_rows(cached[0], (cached[0], cached[1]))
    rows = [(firsts + own[:, None]).reshape(len(own), -1) for own in places]
    return torch.from_numpy(np.concatenate(rows, 1))


def _rotations(
    readings: Sequence[Sequence[Reading]], kept: Sequence[Kept], heads: int, kv_heads: int
) -> tuple[int, Rotations | None]:
    """The number of the first query that turns, and rotations from it on.

    A query that does not turn has a rotation by nothing. Those of new keys are the last rows.
    """
    cosines, sines, rows = list[np.ndarray](), list[np.ndarray](), list[int]()
    for own in readings:
        if own[0] is ORDINARY:
            rows += [0] * heads
            continue
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
    cos, sin = (np.concatenate(each, 1) for each in ((still[0], *cosines), (still[1], *sines)))
    return first, Rotations((torch.from_numpy(cos), torch.from_numpy(sin)), torch.tensor(rows[first:]))
