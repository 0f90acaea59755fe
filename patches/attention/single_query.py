"""Attention of one new query: only to keys that it reaches, and over raw keys with as few rotations as possible.

A rotated query and a rotated key have the score of the query, rotated by both, and the raw key: R(a) q . R(b) k =
R(a - b) q . k (RoFormer, arXiv:2104.09864, equation 16). Keys that share a position, as the groups of Self-Extend, are
therefore read as they are, and one query per group rotates. Other keys rotate by minus their effective distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from patches.attention.states import SegmentStates, Table
from patches.encoding.recipe import Band
from patches.encoding.rotary import per_pair, rotary_table, rotate


@dataclass(frozen=True)
class Part:
    """Key columns that one band covers, as runs of ``run`` keys at one position."""

    band: Band
    columns: slice
    run: int = 1

    @property
    def keys(self) -> int:
        return int(self.columns.stop) - int(self.columns.start)


def single_query(states: SegmentStates) -> torch.Tensor:
    """Output [rows, heads, 1, value dim]."""
    parts = states.shared("parts", lambda: _parts(states))
    value, bias = _reached(parts, states.value), states.shared("bias", lambda: _bias(states, parts))
    if any(part.run > 1 for part in parts):
        return _over_runs(states, parts, value, bias)
    key = _reached(parts, states.key)
    if states.resolved.rotates_at == "cache_read":
        table = states.shared("distance", lambda: _distance_table(states, parts, backward=True))
        key = rotate(key, *table, interleaved=states.resolved.interleaved, offset=states.resolved.offset)
    return F.scaled_dot_product_attention(
        states.query,
        key,
        value,
        attn_mask=bias,
        scale=states.scaling,
        enable_gqa=states.query.shape[1] != key.shape[1],
    )


def _parts(states: SegmentStates) -> list[Part]:
    """The keys that the query reaches, in the order of their columns: each predicate covers a range of them."""
    groups = states.query.shape[1] // states.key.shape[1]
    by_runs = states.resolved.rotates_at == "cache_read" and _computes_openly(states)
    parts = []
    for band in states.resolved.recipe.bands:
        columns = states.columns(*states.predicate(band).key_range(states.q_start, states.q_start))
        run = band.key_map.run
        if not by_runs or run <= groups:  # as many rotated queries as rotated keys, or more
            parts.append(Part(band, columns))
            continue
        position = states.position(columns.start)
        first = min(columns.start - position % -run, columns.stop)
        last = columns.stop - (columns.stop - first) % run
        edges = [columns.start, first, last, columns.stop]
        for (start, stop), length in zip(
            pairwise(edges), (first - columns.start, run, columns.stop - last), strict=True
        ):
            parts.append(Part(band, slice(start, stop), length))
    return sorted((part for part in parts if part.keys > 0), key=lambda part: part.columns.start)


def _computes_openly(states: SegmentStates) -> bool:
    """True where scores of one query are as fast in the open as inside the kernel, and as exact."""
    return states.query.device.type == "cpu" and states.query.dtype == torch.float32


def _reached(parts: list[Part], states: torch.Tensor) -> torch.Tensor:
    """The columns of ``parts`` of keys or values, as a view if they follow on each other."""
    if all(left.columns.stop == right.columns.start for left, right in pairwise(parts)):
        return states[:, :, parts[0].columns.start : parts[-1].columns.stop]
    return torch.cat([states[:, :, part.columns] for part in parts], dim=2)


def _bias(states: SegmentStates, parts: list[Part]) -> torch.Tensor | None:
    """The recipe's bias [1, heads, 1, keys] of the keys in ``parts``."""
    if states.resolved.recipe.score_bias is None:
        return None
    return torch.cat([states.bias([part.band], states.q_start, 1, part.columns) for part in parts], dim=-1)


def _distance_table(states: SegmentStates, parts: list[Part], *, backward: bool) -> Table:
    """cos and sin [runs, rotary_dim] of the effective distance to each run of keys, or of minus it."""
    q_idx = torch.tensor([states.q_start], device=states.key.device)
    apart = [
        per_pair(part.band.query_map(q_idx)) - per_pair(part.band.key_map(states.positions(part.columns)[:: part.run]))
        for part in parts
    ]
    pairs = max(distance.shape[-1] for distance in apart)
    distance = torch.cat([distance.float().expand(-1, pairs) for distance in apart])
    inv_freq = torch.tensor(states.resolved.turns, device=states.key.device)
    # The factor multiplies both the query's and the key's table, so here it enters squared.
    factor, layout = states.resolved.attention_factor**2, states.resolved.interleaved
    return rotary_table(-distance if backward else distance, inv_freq, factor, interleaved=layout)


def _over_runs(
    states: SegmentStates, parts: list[Part], value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Softmax over explicit scores of raw keys: one query has one row of them."""
    tables = states.shared(
        "distances", lambda: [_distance_table(states, [part], backward=part.run == 1) for part in parts]
    )
    scores = torch.cat([_scores(states, *each) for each in zip(parts, tables, strict=True)], -1) * states.scaling
    weights = (scores if bias is None else scores + bias).softmax(dim=-1)
    kv_heads = value.shape[1]
    output: torch.Tensor = weights.unflatten(1, (kv_heads, -1)).squeeze(3) @ value
    return output.flatten(1, 2)[:, :, None]


def _scores(states: SegmentStates, part: Part, table: Table) -> torch.Tensor:
    """Scores [rows, heads, 1, keys] before scaling."""
    query, key, resolved = states.query, states.key[:, :, part.columns], states.resolved
    if part.run == 1:
        key = rotate(key, *table, interleaved=resolved.interleaved, offset=resolved.offset)
        query = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
        scores: torch.Tensor = query @ key.transpose(2, 3)
        return scores.flatten(1, 2)[:, :, None]
    runs = part.keys // part.run
    query = query.expand(-1, -1, runs, -1)
    query = rotate(query, *table, interleaved=resolved.interleaved, offset=resolved.offset)
    query = query.unflatten(1, (key.shape[1], -1)).transpose(2, 3)  # [rows, kv_heads, runs, group, head_dim]
    key = key.unflatten(2, (runs, part.run)).transpose(3, 4)
    # One product per head of keys: all heads at once would copy the keys to one batch.
    rows = [torch.stack([q @ k for q, k in zip(*heads, strict=True)]) for heads in zip(query, key, strict=True)]
    return torch.stack(rows).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :, None]
