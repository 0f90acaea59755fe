"""Attention over explicit scores, in blocks of queries, where no fused kernel fits.

These are soft limits, learned sinks, a bias of the layer, and encodings that score distances by the query.
"""

from __future__ import annotations

import torch

from patches.attention.blocks import blocks
from patches.attention.states import SegmentStates
from patches.encoding.recipe import RelativeScores


def eager(states: SegmentStates) -> torch.Tensor:
    """Output [rows, heads, q, value dim], by the order of operations that transformers uses."""
    groups = states.query.shape[1] // states.key.shape[1]
    value = states.value.repeat_interleave(groups, 1)
    every = slice(0, states.key.shape[2])
    keys = [states.keys(band, every).repeat_interleave(groups, 1) for band in states.resolved.recipe.bands]
    outputs = []
    for columns in blocks(states):
        query, layer = states.query[:, :, columns], states.layer.part(slice(None), columns, slice(None))
        scores = _scores(states, query, states.q_start + columns.start, keys, layer.relative_logits)
        bias = layer.bias
        weights = _weights(layer.sink_logits, scores if bias is None else scores + bias)
        if bias is not None:  # the keys that a layer chose may all be out of the encoding's reach
            weights = weights.nan_to_num(0.0)
        outputs.append(weights.to(query.dtype) @ value)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _scores(
    states: SegmentStates,
    query: torch.Tensor,
    q_low: int,
    keys: list[torch.Tensor],
    relative_logits: torch.Tensor | None,
) -> torch.Tensor:
    q_idx, kv_idx = states.indices(q_low, query.shape[2], slice(None))
    scores, covered = None, None
    for band, key in zip(states.resolved.recipe.bands, keys, strict=True):
        band_scores = states.queries(query, q_low, band) @ key.transpose(2, 3) * states.scaling
        inside = states.predicate(band)(q_idx, kv_idx)
        scores = band_scores if scores is None else torch.where(inside, band_scores, scores)
        covered = inside if covered is None else covered | inside
    assert scores is not None  # a recipe has at least one band
    assert covered is not None
    if relative_logits is not None:
        scores = scores + states.tempered(relative_logits, q_low)
    if states.resolved.recipe.relative is not None:
        scores = scores + _relative(states, states.resolved.recipe.relative, q_idx, kv_idx, keys[0])
    if states.layer.softcap is not None:
        scores = torch.tanh(scores / states.layer.softcap) * states.layer.softcap
    if states.resolved.recipe.score_bias is not None:
        scores = scores + states.resolved.recipe.score_bias(q_idx, kv_idx)
    excluded = torch.finfo(scores.dtype).min if states.layer.bias is None else float("-inf")
    return scores.masked_fill(~covered, excluded)


def _relative(
    states: SegmentStates, relative: RelativeScores, q_idx: torch.Tensor, kv_idx: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Some of its terms do not depend on the query, so the temperature multiplies the sum of all."""
    assert states.layer.attention is not None
    q_low = int(q_idx[0, 0])
    low = q_low - states.q_start
    query = states.untempered[:, :, low : low + len(q_idx)]
    scores = relative(states.layer.attention, query, key, (q_idx - kv_idx).clamp_min(0))
    return states.tempered(scores * states.layer.scaling, q_low)


def _weights(sink_logits: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    if sink_logits is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    nothing = sink_logits.expand(scores.shape[0], -1, scores.shape[2], -1)
    logits = torch.cat([scores, nothing], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
