"""Attention of one new query, as in every step of decoding.

Each band covers a range of keys for it, so nothing needs a mask. The query turns if a band reads keys as they were
written: R(a) q . R(b) k = R(a - b) q . k (RoFormer, arXiv:2104.09864, equation 16). Other keys turn by the difference
between their written distance and that of the band.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F

from patches.attention.log_sum_exp import Attended, merged, sdpa_with_lse
from patches.attention.states import SegmentStates
from patches.encoding.recipe import Band
from patches.encoding.rotary import per_pair


def single_query(states: SegmentStates) -> torch.Tensor:
    """Output [rows, heads, 1, value dim]."""
    parts = states.shared("parts", lambda: _parts(states))
    if len(parts) == 1:
        return _one_part(states, *parts[0])
    out, _ = reduce(merged, (_with_lse(states, *part) for part in parts))
    return out.to(states.query.dtype)


def _parts(states: SegmentStates) -> list[tuple[Band, slice]]:
    """The bands that the query reaches keys in, and the columns of these keys."""
    parts = [(band, states.reached(band)) for band in states.resolved.recipe.bands]
    return [(band, columns) for band, columns in parts if columns.start < columns.stop]


def _one_part(states: SegmentStates, band: Band, columns: slice) -> torch.Tensor:
    query, key = _seen(states, band, columns)
    return F.scaled_dot_product_attention(
        query,
        key,
        states.value[:, :, columns],
        attn_mask=_bias(states, band, columns),
        scale=states.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _with_lse(states: SegmentStates, band: Band, columns: slice) -> Attended:
    value, bias = states.value[:, :, columns], _bias(states, band, columns)
    return sdpa_with_lse(*_seen(states, band, columns), value, bias, states.scaling)


def _bias(states: SegmentStates, band: Band, columns: slice) -> torch.Tensor | None:
    """The recipe's bias [1, heads, 1, keys]."""
    if states.resolved.recipe.score_bias is None:
        return None
    return states.shared(("bias", band), lambda: states.bias([band], states.q_start, 1, columns))


def _seen(states: SegmentStates, band: Band, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The query and the keys of ``columns``, one of them turned to their distance in ``band``."""
    query, key = states.query, states.key[:, :, columns]
    if states.is_as_written(band.key_map):
        return states.queries(query, states.q_start, band), key
    return query, states.turned(key, ("distance", band), lambda: _excess(states, band, columns))


def _excess(states: SegmentStates, band: Band, columns: slice) -> torch.Tensor:
    """Positions [keys, 1 or pairs] by which the distance to keys as they were written exceeds that in ``band``."""
    base = states.resolved.recipe.base
    q_idx, kv_idx = torch.tensor([states.q_start], device=states.key.device), states.positions(columns)
    written = per_pair(base(q_idx)) - per_pair(base(kv_idx))
    return written - (per_pair(band.query_map(q_idx)) - per_pair(band.key_map(kv_idx)))
