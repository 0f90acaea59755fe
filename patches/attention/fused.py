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
from patches.attention.eager import eager
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import has_kernel, merged, nothing, part, sdpa_with_lse
from patches.attention.single_query import single_query
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch
from patches.encoding.recipe import ResolvedRecipe

LONG_CONTEXT = 4096
"""Earlier keys from which they are a call by themselves. Over fewer, a merge takes as long as the mask."""


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
    if states.is_plain:
        return ordinary(states)
    if query.shape[2] == 1:
        return single_query(states)
    return by_bands(states)


def ordinary(states: SegmentStates) -> torch.Tensor:
    """Plain causal attention: transformers' own SDPA call, so the result is the same to the bit.

    The exception are parts of a long text on a CPU, whose attention takes no [q, k] mask.
    """
    new, earlier = states.query.shape[2], states.q_start - states.k_start
    masked, on_cpu = earlier > 0 and new > 1, states.key.device.type == "cpu"
    if masked and earlier >= LONG_CONTEXT and on_cpu and has_kernel(states.query, states.key, states.value):
        return _in_two_parts(states)
    mask = states.shared("mask", lambda: _causal_mask(states)) if masked else None
    return F.scaled_dot_product_attention(
        states.query,
        states.key,
        states.value,
        attn_mask=mask,
        is_causal=mask is None and new > 1,
        scale=states.scaling,
        enable_gqa=states.query.shape[1] != states.key.shape[1],
    )


def _in_two_parts(states: SegmentStates) -> torch.Tensor:
    """Every query reads all earlier keys. Among the new ones, it reads those up to itself."""
    new, scaling, keys = states.query.shape[2], states.scaling, (states.key, states.value)
    before = sdpa_with_lse(states.query, *part(keys, slice(-new)), None, scaling)
    own = sdpa_with_lse(states.query, *part(keys, slice(-new, None)), None, scaling, causal=True)
    return merged(before, own)[0].to(states.query.dtype)


def by_bands(states: SegmentStates) -> torch.Tensor:
    """Each band attends to the keys it can reach. All queries go at once if that takes few calls, else by blocks."""
    attended = nothing(states.query, states.value.shape[-1])
    by_blocks = []
    for band in states.resolved.recipe.bands:
        if not at_once(states, band, attended):
            reached = states.reached(band)
            by_blocks.append((band, states.keys(band, reached), reached.start))
    for columns in blocks(states) if by_blocks else ():
        for band, key, first in by_blocks:
            add_band(states, columns, band, key, first, attended)
    return attended[0].to(states.query.dtype)


def _causal_mask(states: SegmentStates) -> torch.Tensor:
    """Additive [q, k]. Given booleans, the kernel would make this mask anew in every layer. Comparing positions would
    take 40 times as long as cutting off a triangle."""
    new, keys = states.query.shape[2], states.key.shape[2]
    mask = torch.full((new, keys), float("-inf"), dtype=states.query.dtype, device=states.query.device)
    return mask.triu_(keys - new + 1)
