"""The reading of one new query: its calls over keys, as in every step of decoding.

Each band covers a range of keys for it, so nothing needs a mask. The query turns if a band reads keys as they were
written: R(a) q . R(b) k = R(a - b) q . k (RoFormer, arXiv:2104.09864, equation 16). Other keys turn by the difference
between their written distance and that of the band. Bands of few keys are one call, over a copy of the keys.

A step decides this for each sequence. Only positions count, so no tensor is divided for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from patches.attention.decode.sums.rings import Turning
from patches.attention.decode.tables import Table, bias_by_distance, moves, rotations, shared_rotation
from patches.attention.layer import Layer
from patches.attention.positions import SegmentPositions
from patches.encoding.bands import Band, PositionMap
from patches.encoding.masks import LayerMask
from patches.encoding.recipe import ResolvedRecipe, ScoreBias

FEW = 512
"""Copying so many keys takes no longer than another call of the kernel and a merge."""

EVERY = slice(None)


class Part(NamedTuple):
    """Keys that one call reads, the same in all layers: their ``columns``, and the additive ``bias``
    [1, heads, 1, keys].

    The query turns by ``query``. In ``pieces``, each piece of the columns has the table that its keys turn by. In their
    place, ``once`` has all keys of a part that each turn once.
    """

    columns: slice = EVERY
    query: Table | None = None
    pieces: tuple[tuple[slice, Table], ...] = ()
    bias: torch.Tensor | None = None
    once: Turning | None = None

    def follows(self, before: Part, length: int) -> bool:
        """As for a reading."""
        own, others = range(length)[self.columns], range(length - 1)[before.columns]
        has_moved = own.start - others.start in (0, 1) and own.stop - others.stop in (0, 1)
        is_alike = (self.bias is None) == (before.bias is None) and (self.once is None) == (before.once is None)
        return has_moved and is_alike and not (self.pieces or before.pieces)

    @property
    def keys(self) -> tuple[tuple[slice, Table], ...]:
        """``pieces``, also of keys that turn once."""
        if self.once is None:
            return self.pieces
        return ((slice(0, len(self.once.positions)), self.once.table(self.once.positions)),)


@dataclass(eq=False)
class Reading:
    """The calls that one query's attention takes, the same in all layers that see the same keys.

    ``multiplier`` is that of the scores, and ``factor`` [1, 1] that of the query, None for 1.
    """

    parts: list[Part]
    multiplier: float = 1.0
    factor: torch.Tensor | None = None
    interleaved: bool = False
    offset: int = 0

    def keys(self, length: int) -> int:
        """The number of keys that it reads, of ``length``."""
        return sum(len(range(length)[part.columns]) for part in self.parts)

    @cached_property
    def turns(self) -> list[int]:
        """For each part, the number of its query's turn: parts with one query share a softmax."""
        distinct: dict[int, int] = {}
        return [distinct.setdefault(id(part.query), len(distinct)) for part in self.parts]

    @cached_property
    def firsts(self) -> list[int]:
        """The first part with each turn of the query."""
        found: dict[int, int] = {}
        for number, part in enumerate(self.parts):
            found.setdefault(id(part.query), number)
        return list(found.values())

    @cached_property
    def queries(self) -> list[Table | None]:
        """The turns of the query."""
        return [self.parts[number].query for number in self.firsts]

    @cached_property
    def turns_states(self) -> bool:
        """True if its query turns, or keys."""
        return any(part.query or part.pieces or part.once for part in self.parts)

    def follows(self, before: Reading, length: int) -> bool:
        """True if it reads ``length`` keys as ``before`` read one less: parts have at most one key more, and less."""
        if len(self.parts) != len(before.parts) or self.turns != before.turns or self.multiplier != before.multiplier:
            return False
        return all(one.follows(other, length) for one, other in zip(self.parts, before.parts, strict=True))

    @cached_property
    def turned_keys(self) -> int:
        """The number of keys that it reads in other positions than they were written in."""
        turning = sum(len(table[0]) for part in self.parts for _, table in part.pieces)
        return turning + sum(len(part.once.positions) for part in self.parts if part.once)


ORDINARY = Reading([Part()])
"""Ordinary causal attention to all keys."""


def reading_of(segment: SegmentPositions, turns_once: bool = False) -> Reading:
    """The reading of the single query of ``segment``. With ``turns_once``, keys turn once, on a CPU in inference."""
    resolved, reached, few = segment.resolved, segment.reached(), segment.length <= FEW
    base = resolved.recipe.base
    query_map = _shared_map(segment, reached) if few and len(reached) > 1 else base
    queries: dict[PositionMap, Table | None] = {}
    parts = []
    for band, columns in reached:
        turns = not segment.is_as_written(band.key_map)
        spans = segment.spans(columns)
        once = Turning(band, resolved, spans[0]) if turns and turns_once and len(spans) == 1 else None
        own = query_map if turns and once is None else band.query_map
        if own not in queries:
            queries[own] = None if segment.is_as_written(own) else _query_table(segment, own, turns_once)
        pieces: tuple[tuple[slice, Table], ...] = ()
        if turns and once is None:
            whole = slice(0, columns.stop - columns.start)
            pieces = ((whole, shared_rotation(_excess(segment, band, columns, own), resolved)),)
        parts.append(Part(columns, queries[own], pieces, _bias(segment, band, columns), once))
    if few and len(parts) > 1:
        parts = _joined(parts)
    if len(parts) == 1 and parts[0].columns == slice(0, segment.length):
        parts = [parts[0]._replace(columns=EVERY)]
    return Reading(parts, *segment.temperature, resolved.interleaved, resolved.offset)


def biased_reading(score_bias: ScoreBias, position: int, dtype: torch.dtype, device: torch.device) -> Reading:
    """The reading of a query at ``position`` of all keys up to there, with a bias by distance."""
    return Reading([Part(bias=bias_by_distance(score_bias, range(position + 1), device).to(dtype)[None])])


def readings_at(
    resolved: ResolvedRecipe, mask: LayerMask, places: range, length: int, num_sinks: int, dtype: torch.dtype
) -> Sequence[Reading]:
    """The readings of a query that goes from the first of ``places`` on, as long as they are alike.

    Keys turn once. The first query has ``length`` keys. Every sequence of the encoding comes there, so readings are
    kept. Those with a bias have one number for each key, and are made anew.
    """
    make = _kept_readings if resolved.recipe.score_bias is None else _readings_at
    return make(resolved, mask, places, length, num_sinks, dtype)


def _readings_at(
    resolved: ResolvedRecipe, mask: LayerMask, places: range, length: int, num_sinks: int, dtype: torch.dtype
) -> Sequence[Reading]:
    make = _kept_reading if resolved.recipe.score_bias is None else _reading_at
    found: list[Reading] = []
    for now, position in enumerate(places, length):
        reading = make(resolved, mask, position, now, num_sinks, dtype)
        if found and not reading.follows(found[-1], now):
            break
        found.append(reading)
    return found


_kept_readings = lru_cache(512)(_readings_at)  # each keeps up to eight, and their tables


def _reading_at(
    resolved: ResolvedRecipe, mask: LayerMask, position: int, length: int, num_sinks: int, dtype: torch.dtype
) -> Reading:
    queries, cpu = range(position, position + 1), torch.device("cpu")
    return reading_of(SegmentPositions(resolved, Layer(1.0, mask), queries, length, num_sinks, dtype, cpu), True)


_kept_reading = lru_cache(4096)(_reading_at)


def _shared_map(segment: SegmentPositions, reached: list[tuple[Band, slice]]) -> PositionMap:
    """The query map to which keys turn: that of the band that reads most keys as they were written."""
    written = [(columns.stop - columns.start, band) for band, columns in reached if segment.is_as_written(band.key_map)]
    if not written:
        return segment.resolved.recipe.base
    return max(written, key=lambda each: each[0])[1].query_map


def _bias(segment: SegmentPositions, band: Band, columns: slice) -> torch.Tensor | None:
    """Additive bias [1, heads or 1, 1, keys] of the keys of ``columns``, all covered by ``band``."""
    score_bias = segment.resolved.recipe.score_bias
    if score_bias is None:
        return None
    if segment.num_sinks or not score_bias.by_distance:
        return segment.bias([band], *segment.indices(segment.q_start, 1, columns))
    farthest = segment.q_start - segment.position(columns.start)
    distances = range(farthest + 1 - (columns.stop - columns.start), farthest + 1)
    return bias_by_distance(score_bias, distances, segment.device).to(segment.dtype)[None]


def _joined(parts: list[Part]) -> list[Part]:
    """``parts`` by columns, where neighbours of the same query are one."""
    joined: list[Part] = []
    for part in sorted(parts, key=lambda part: part.columns.start):
        last = joined[-1] if joined else None
        is_next = last is not None and last.columns.stop == part.columns.start and last.query is part.query
        if last is None or not is_next or last.once or part.once:
            joined.append(part)
            continue
        bias = None if last.bias is None or part.bias is None else torch.cat((last.bias, part.bias), -1)
        columns, by = slice(last.columns.start, part.columns.stop), part.columns.start - last.columns.start
        moved = ((slice(piece.start + by, piece.stop + by), table) for piece, table in part.pieces)
        joined[-1] = Part(columns, last.query, (*last.pieces, *moved), bias)
    return joined


def _excess(segment: SegmentPositions, band: Band, columns: slice, query_map: PositionMap) -> torch.Tensor:
    """Positions [keys, 1 or pairs] by which a query's distance under ``query_map`` to keys as they were written exceeds
    that in ``band``."""
    base, device = segment.resolved.recipe.base, segment.device
    keys = [moves(band.key_map, base, span, device) for span in segment.spans(columns)]
    return _query_moves(segment, query_map, band.query_map) + (keys[0] if len(keys) == 1 else torch.cat(keys))


def _query_table(segment: SegmentPositions, to: PositionMap, is_shared: bool) -> Table:
    """The rotation of the query from the base to ``to``."""
    if is_shared:
        return rotations(to, segment.resolved, range(segment.q_start, segment.q_stop))
    return shared_rotation(_query_moves(segment, to, segment.resolved.recipe.base), segment.resolved)


def _query_moves(segment: SegmentPositions, to: PositionMap, base: PositionMap) -> torch.Tensor:
    return moves(to, base, range(segment.q_start, segment.q_stop), segment.device)
