"""Attention of one new query, as in every step of decoding.

Each band covers a range of keys for it, so nothing needs a mask. The query turns if a band reads keys as they were
written: R(a) q . R(b) k = R(a - b) q . k (RoFormer, arXiv:2104.09864, equation 16). Other keys turn by the difference
between their written distance and that of the band. Bands of few keys are one call, over a copy of the keys.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from patches.attention.decode.tables import Table, bias_by_distance, shared_rotation
from patches.attention.log_sum_exp import merged, sdpa_with_lse
from patches.attention.states import SegmentStates
from patches.encoding.recipe import Band, PositionMap
from patches.encoding.rotary import per_pair, turn, turn_

FEW = 512
"""Copying so many keys takes no longer than another call of the kernel and a merge."""

MANY = 1024
"""Keys, times the query heads of each key head, from which such heads are its queries. Over fewer keys, calls by query
head are as fast on one thread and faster on several."""

EVERY = slice(None)


class Part(NamedTuple):
    """Keys that one call reads, the same in all layers: their ``columns``, and the additive ``bias``
    [1, heads, 1, keys].

    The query turns by ``query``. In ``keys``, each piece of the columns has the table that its keys turn by.
    """

    columns: slice = EVERY
    query: Table | None = None
    keys: tuple[tuple[slice, Table], ...] = ()
    bias: torch.Tensor | None = None


class Reading(NamedTuple):
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

    @property
    def turned_keys(self) -> int:
        """The number of keys that it reads in other positions than they were written in."""
        return sum(len(table[0]) for part in self.parts for _, table in part.keys)


ORDINARY = Reading([Part()])
"""Ordinary causal attention to all keys."""


def single_query(states: SegmentStates) -> torch.Tensor:
    """Output [rows, heads, 1, value dim]."""
    reading = states.shared("reading", lambda: reading_of(states))
    return read(states.untempered, states.key, states.value, states.layer.scaling, reading)


def reading_of(states: SegmentStates) -> Reading:
    """The reading of the single query of ``states``; of the states themselves, only shapes and positions count."""
    reached, few = states.reached(), states.key.shape[2] <= FEW
    query_map = _shared_map(states, reached) if few else states.resolved.recipe.base
    queries: dict[PositionMap, Table | None] = {}
    for band in reached:
        own = band.query_map if states.is_as_written(band.key_map) else query_map
        if own not in queries:
            turns = not states.is_as_written(own)
            queries[own] = shared_rotation(states.moved(own, states.q_idx), states.resolved) if turns else None
    parts = [_part(states, band, columns, query_map, queries) for band, columns in reached.items()]
    if few:
        parts = _joined(parts)
    multiplier, factor = states.temperature
    if len(parts) == 1 and parts[0].columns == slice(0, states.key.shape[2]):
        parts = [parts[0]._replace(columns=EVERY)]
    return Reading(parts, multiplier, factor, states.resolved.interleaved, states.resolved.offset)


def read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, reading: Reading) -> torch.Tensor:
    """Output [rows, heads, 1, value dim] of ``query`` [rows, heads, 1, head_dim].

    Kernels read keys again for each query head. Over many keys, heads that share a key head are its queries. Nothing
    is masked, so that is the same. CUDA has no kernel for a bias and heads that share key heads.
    """
    rows, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    if heads > kv_heads and (key.shape[2] * heads >= MANY * kv_heads or query.device.type == "cuda"):
        query = query.reshape(rows, kv_heads, heads // kv_heads, query.shape[-1])
    if reading is ORDINARY:
        out = _attend(query, key, value, None, scaling)
    else:
        scaling *= reading.multiplier
        if reading.factor is not None:
            query = (query * reading.factor).to(query.dtype)
        seen = [_seen(query, key, value, part, reading) for part in reading.parts]
        if len(seen) == 1:
            out = _attend(*seen[0], scaling)
        else:
            out = reduce(merged, (sdpa_with_lse(*each, scaling) for each in seen))[0].to(query.dtype)
    return out if out.shape[1] == heads else out.reshape(rows, heads, 1, out.shape[-1])


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    shares_keys = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=shares_keys)


def _shared_map(states: SegmentStates, reached: dict[Band, slice]) -> PositionMap:
    """The query map to which keys turn: that of the band that reads most keys as they were written."""
    sizes = {
        band.query_map: columns.stop - columns.start
        for band, columns in reached.items()
        if states.is_as_written(band.key_map)
    }
    return max(sizes, key=sizes.__getitem__, default=states.resolved.recipe.base)


def _part(
    states: SegmentStates,
    band: Band,
    columns: slice,
    query_map: PositionMap,
    queries: dict[PositionMap, Table | None],
) -> Part:
    bias = _bias(states, band, columns)
    if states.is_as_written(band.key_map):
        return Part(columns, queries[band.query_map], (), bias)
    whole = slice(0, columns.stop - columns.start)
    turned = shared_rotation(_excess(states, band, columns, query_map), states.resolved)
    return Part(columns, queries[query_map], ((whole, turned),), bias)


def _bias(states: SegmentStates, band: Band, columns: slice) -> torch.Tensor | None:
    """Additive bias [1, heads or 1, 1, keys] of the keys of ``columns``, all covered by ``band``."""
    score_bias = states.resolved.recipe.score_bias
    if score_bias is None:
        return None
    if states.num_sinks or not score_bias.by_distance:
        return states.bias([band], *states.indices(states.q_start, 1, columns))
    farthest = states.q_start - states.position(columns.start)
    distances = range(farthest + 1 - (columns.stop - columns.start), farthest + 1)
    return bias_by_distance(score_bias, distances, states.query.device).to(states.query.dtype)[None]


def _joined(parts: list[Part]) -> list[Part]:
    """``parts`` by columns, where neighbours of the same query are one."""
    joined: list[Part] = []
    for part in sorted(parts, key=lambda part: part.columns.start):
        last = joined[-1] if joined else None
        if last is None or last.columns.stop != part.columns.start or last.query is not part.query:
            joined.append(part)
            continue
        bias = None if last.bias is None or part.bias is None else torch.cat((last.bias, part.bias), -1)
        columns, by = slice(last.columns.start, part.columns.stop), part.columns.start - last.columns.start
        moved = ((slice(piece.start + by, piece.stop + by), table) for piece, table in part.keys)
        joined[-1] = Part(columns, last.query, (*last.keys, *moved), bias)
    return joined


def _seen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part, reading: Reading
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The query, keys, values and bias of a part, turned to their distance in its bands."""
    interleaved, offset = reading.interleaved, reading.offset
    if part.query is not None:
        query = turn(query, *part.query, interleaved=interleaved, offset=offset)
    if part.columns != EVERY:
        key, value = key[:, :, part.columns], value[:, :, part.columns]
    whole = slice(0, key.shape[2])
    if any(piece != whole for piece, _ in part.keys):
        key = key.clone()
    for piece, table in part.keys:
        if piece == whole:
            key = turn(key, *table, interleaved=interleaved, offset=offset)
        else:
            turn_(key[:, :, piece], *table, interleaved=interleaved, offset=offset)
    bias = part.bias
    if bias is not None and bias.shape[1] > query.shape[1]:  # heads as queries have a row each
        bias = bias.reshape(len(bias), query.shape[1], -1, bias.shape[-1])
    return query, key, value, bias


def _excess(states: SegmentStates, band: Band, columns: slice, query_map: PositionMap) -> torch.Tensor:
    """Positions [keys, 1 or pairs] by which a query's distance under ``query_map`` to keys as they were written exceeds
    that in ``band``."""
    base, q_idx, kv_idx = states.resolved.recipe.base, states.q_idx, states.positions(columns)
    written = per_pair(query_map(q_idx)) - per_pair(base(kv_idx))
    return written - (per_pair(band.query_map(q_idx)) - per_pair(band.key_map(kv_idx)))
