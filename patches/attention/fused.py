"""Attention of one segment on fused kernels, band by band, merged exactly by log-sum-exp.

One band over all keys is ordinary attention. All else goes band by band: a ``single_query``, all queries
``at_once``, or in ``blocks``. Layers with a soft limit, sinks or a bias, and encodings that score distances by the
query, go to ``eager``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from patches.attention.at_once import at_once
from patches.attention.blocks import add_band, blocks
from patches.attention.decode.single_query import single_query
from patches.attention.eager import eager
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import has_kernel, nothing
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch
from patches.encoding.bands import Band
from patches.encoding.masks import ChunkRange, DistanceRange
from patches.encoding.recipe import ResolvedRecipe

LONG_CONTEXT = 4096
"""Earlier keys from which plain attention on a CPU goes by bands. Over fewer, a merge takes as long as the mask. CUDA
has no kernel for a mask and heads that share key heads, so there it is one key."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    resolved: ResolvedRecipe,
    batch: Batch,
    layer: Layer,
    *,
    q_start: int,
    num_sinks: int = 0,
) -> torch.Tensor:
    """Attention output [rows, heads, q, value dim] in the dtype of ``query``.

    ``query`` [rows, heads, q, head_dim] has the positions q_start, q_start + 1, ...; ``key`` [rows, kv_heads,
    k, head_dim] and ``value`` end at the last of them. Queries and keys are written under the base map of the recipe,
    with its attention factor. If keys were evicted, the first ``num_sinks`` columns are those at positions
    0 .. num_sinks - 1. ``batch`` has the tables that all layers of the forward share.
    """
    states = SegmentStates(query, key, value, resolved, batch, layer, q_start, num_sinks)
    if resolved.recipe.relative is not None or any(
        part is not None for part in (layer.softcap, layer.sinks, layer.bias, layer.relative_logits)
    ):
        return eager(states)
    if states.is_plain and not _goes_without_mask(states):
        return ordinary(states, states.query, states.key)
    if query.shape[2] == 1:
        return single_query(states)
    return by_bands(states)


def _goes_without_mask(states: SegmentStates) -> bool:
    """True for several queries behind ``LONG_CONTEXT`` keys. Their band is two calls without a mask [q, k]."""
    several, earlier = states.query.shape[2] > 1, states.q_start - states.k_start
    least = LONG_CONTEXT if states.key.device.type == "cpu" else 1
    return several and earlier >= least and has_kernel(states.query, states.key, states.value)


def ordinary(states: SegmentStates, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Plain causal attention of ``query`` to ``key``, those of ``states`` or as a band sees them.

    It is transformers' own SDPA call, so the result is the same to the bit.
    """
    new = states.query.shape[2]
    past = states.k_start < states.q_start and new > 1
    mask = states.shared("mask", lambda: _causal_mask(states)) if past else None
    return F.scaled_dot_product_attention(
        query,
        key,
        states.value,
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=states.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def by_bands(states: SegmentStates) -> torch.Tensor:
    """Each band attends to the keys it can reach. All queries go at once if that takes few calls, else by blocks.

    In a short text, one band often has all keys. It is plain attention of turned queries to turned keys.
    """
    reached = states.reached()
    if len(reached) == 1 and not _goes_without_mask(states):
        ((band, columns),) = reached
        if _has_all_pairs(states, band):
            return ordinary(states, states.queries(states.query, states.q_start, band), states.keys(band, columns))
    attended = nothing(states.query, states.value.shape[-1])
    by_blocks = []
    for band, columns in reached:
        if not at_once(states, band, attended):
            by_blocks.append((band, states.keys(band, columns), columns.start))
    for queries in blocks(states) if by_blocks else ():
        for band, key, first in by_blocks:
            add_band(states, queries, band, key, first, attended)
    return attended[0].to(states.query.dtype)


def _has_all_pairs(states: SegmentStates, band: Band) -> bool:
    """True if nothing but ``band`` decides over pairs, and it has every causal one.

    The ordinary call must have a kernel too: on a CPU, it has none for values of another width.
    """
    predicate, key, value = band.predicate, states.key, states.value
    return (
        key.device.type == "cpu"
        and key.shape[-1] == value.shape[-1]
        and states.is_bare
        and isinstance(predicate, DistanceRange | ChunkRange)
        and predicate.is_causal_below(states.q_stop)
    )


def _causal_mask(states: SegmentStates) -> torch.Tensor:
    """Additive [q, k]. Given booleans, the kernel would make this mask anew in every layer. Comparing positions would
    take 40 times as long as cutting off a triangle."""
    new, keys = states.query.shape[2], states.key.shape[2]
    mask = torch.full((new, keys), float("-inf"), dtype=states.query.dtype, device=states.query.device)
    return mask.triu_(keys - new + 1)
