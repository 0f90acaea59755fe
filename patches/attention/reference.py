"""Eager attention of one segment, over whole score matrices. The specification: slow and plain.

It computes in float32, or in float64 for such states. Tables of cos and sin are float32, as everywhere."""

from __future__ import annotations

import torch

from patches.attention.layer import Layer
from patches.encoding.bands import Band, PositionMap
from patches.encoding.recipe import ResolvedRecipe
from patches.encoding.rotary import per_pair, rotary_table, rotate, upcast


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    resolved: ResolvedRecipe,
    layer: Layer,
    *,
    q_start: int,
) -> torch.Tensor:
    """Attention output [rows, heads, q, head_dim], of ``weights`` and ``value`` [rows, kv_heads, k, dim]."""
    value = upcast(value).repeat_interleave(query.shape[1] // value.shape[1], 1)
    return weights(query, key, resolved, layer, q_start=q_start) @ value


def weights(
    query: torch.Tensor, key: torch.Tensor, resolved: ResolvedRecipe, layer: Layer, *, q_start: int
) -> torch.Tensor:
    """Softmax weights [rows, heads, q, k]. They sum to 1, or to less where ``layer`` has sinks.

    ``query`` [rows, heads, q, head_dim] has the positions q_start, q_start + 1, ...; ``key`` [rows, kv_heads, k,
    head_dim] ends at the last of them. Both are written under the base map of the recipe, with its attention factor.
    """
    query, key = upcast(query), upcast(key)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    q_idx = torch.arange(q_start, q_start + query.shape[2], device=query.device)
    kv_idx = torch.arange(int(q_idx[-1]) + 1 - key.shape[2], int(q_idx[-1]) + 1, device=query.device)
    pairs = q_idx[:, None], kv_idx[None, :]

    scores = torch.full((*query.shape[:3], key.shape[2]), float("-inf"), dtype=query.dtype, device=query.device)
    for band in resolved.recipe.bands:
        covered = band.predicate(*pairs) & layer.mask(*pairs)
        scores = torch.where(covered, _band_scores(query, key, q_idx, kv_idx, band, resolved), scores)
    if resolved.recipe.relative is not None:
        assert layer.attention is not None
        scores = scores + resolved.recipe.relative(layer.attention, query, key, (pairs[0] - pairs[1]).clamp_min(0))
    scores = scores * layer.scaling
    if layer.relative_logits is not None:
        scores = scores + layer.relative_logits
    for temperature in (layer.temperature, resolved.recipe.attention_temperature):
        if temperature is not None:
            scores = scores * temperature(q_idx)[:, None]
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores.masked_fill(~_any_band(resolved, pairs, layer), float("-inf"))
    if resolved.recipe.score_bias is not None:
        scores = scores + resolved.recipe.score_bias(*pairs)
    if layer.bias is not None:
        scores = scores + layer.bias
    if layer.sink_logits is not None:
        nothing = layer.sink_logits.to(scores.dtype).expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat((scores, nothing), dim=-1), dim=-1)[..., :-1]
    weights = torch.softmax(scores, dim=-1)
    return weights if layer.bias is None else weights.nan_to_num(0.0)


def _band_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    band: Band,
    resolved: ResolvedRecipe,
) -> torch.Tensor:
    query = _turned(query, q_idx, band.query_map, resolved)
    return query @ _turned(key, kv_idx, band.key_map, resolved).transpose(-1, -2)


def _turned(states: torch.Tensor, position: torch.Tensor, to: PositionMap, resolved: ResolvedRecipe) -> torch.Tensor:
    """``states`` [rows, heads, n, head_dim] from the base map at ``position`` [n] to the map ``to``."""
    base, layout = resolved.recipe.base, resolved.interleaved
    if to == base:
        return states
    moved = per_pair(to(position)) - per_pair(base(position))
    turns = torch.tensor(resolved.turns, dtype=torch.float32, device=states.device)
    table = rotary_table(moved, turns, 1.0, interleaved=layout)
    return rotate(states, *table, interleaved=layout, offset=resolved.offset)


def _any_band(resolved: ResolvedRecipe, pairs: tuple[torch.Tensor, torch.Tensor], layer: Layer) -> torch.Tensor:
    covered = [band.predicate(*pairs) for band in resolved.recipe.bands]
    return torch.stack(covered).any(0) & layer.mask(*pairs)
