"""Attention of one new query, as in every step of decoding.

Each band covers a range of keys for it, so nothing needs a mask. The query turns if a band reads keys as they were
written: R(a) q . R(b) k = R(a - b) q . k (RoFormer, arXiv:2104.09864, equation 16). Other keys turn by the difference
between their written distance and that of the band.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from patches.attention.log_sum_exp import merged, sdpa_with_lse
from patches.attention.states import SegmentStates, Table
from patches.encoding.recipe import Band
from patches.encoding.rotary import per_pair


class Part(NamedTuple):
    """A band's keys for one query, the same in all layers: their ``columns`` and the additive ``bias``
    [1, heads, 1, keys]. The query turns by ``query``, or the keys by ``key``, or neither."""

    columns: slice
    query: Table | None
    key: Table | None
    bias: torch.Tensor | None


def single_query(states: SegmentStates) -> torch.Tensor:
    """Output [rows, heads, 1, value dim]."""
    parts = states.shared("parts", lambda: _parts(states))
    if len(parts) == 1:
        query, key, value, bias = _seen(states, parts[0])
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, bias, scale=states.scaling, enable_gqa=grouped)
    out, _ = reduce(merged, (sdpa_with_lse(*_seen(states, part), states.scaling) for part in parts))
    return out.to(states.query.dtype)


def _parts(states: SegmentStates) -> list[Part]:
    """One for each band that the query reaches keys in."""
    bands = [(band, states.reached(band)) for band in states.resolved.recipe.bands]
    return [_part(states, band, columns) for band, columns in bands if columns.start < columns.stop]


def _part(states: SegmentStates, band: Band, columns: slice) -> Part:
    biased = states.resolved.recipe.score_bias is not None
    bias = states.bias([band], states.q_start, 1, columns) if biased else None
    if not states.is_as_written(band.key_map):
        return Part(columns, None, states.table(_excess(states, band, columns)), bias)
    moves = not states.is_as_written(band.query_map)
    return Part(columns, states.table(states.moved(band.query_map, states.q_idx)) if moves else None, None, bias)


def _seen(states: SegmentStates, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The query, keys, values and bias of a part, turned to their distance in its band."""
    query, key = states.query, states.key[:, :, part.columns]
    if part.query is not None:
        query = states.turn(query, part.query)
    if part.key is not None:
        key = states.turn(key, part.key)
    return query, key, states.value[:, :, part.columns], part.bias


def _excess(states: SegmentStates, band: Band, columns: slice) -> torch.Tensor:
    """Positions [keys, 1 or pairs] by which the distance to keys as they were written exceeds that in ``band``."""
    base, q_idx, kv_idx = states.resolved.recipe.base, states.q_idx, states.positions(columns)
    written = per_pair(base(q_idx)) - per_pair(base(kv_idx))
    return written - (per_pair(band.query_map(q_idx)) - per_pair(band.key_map(kv_idx)))
