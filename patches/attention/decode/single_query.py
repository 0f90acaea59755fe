"""Attention of one new query in a call for each part of its reading."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F

from patches.attention.decode.reading import EVERY, ORDINARY, Part, Reading, reading_of
from patches.attention.log_sum_exp import merged, sdpa_with_lse
from patches.attention.states import SegmentStates
from patches.encoding.rotary import turn, turn_into

MANY = 1024
"""Keys, times the query heads of each key head, from which such heads are its queries. Over fewer keys, calls by query
head are as fast on one thread and faster on several."""


def single_query(states: SegmentStates) -> torch.Tensor:
    """Output [rows, heads, 1, value dim]."""
    reading = states.shared("reading", lambda: reading_of(states))
    return read(states.untempered, states.key, states.value, states.layer.scaling, reading)


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
            own = key[:, :, piece]
            turn_into(own, own, *table, interleaved=interleaved, offset=offset)
    bias = part.bias
    if bias is not None and bias.shape[1] > query.shape[1]:  # heads as queries have a row each
        bias = bias.reshape(len(bias), query.shape[1], -1, bias.shape[-1])
    return query, key, value, bias
