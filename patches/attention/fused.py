"""Attention of one segment on fused kernels, band by band, merged exactly by log-sum-exp.

Three routes. One identity band is ordinary attention. A single new query attends once: over keys as
they are, or over raw keys turned by their own effective distance. Anything else goes through blocks of
queries, each band over the keys that it can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import torch.nn.functional as F

from patches.attention.log_sum_exp import Attended, merge, sdpa_with_lse
from patches.batch import Batch
from patches.masks import CAUSAL, And, DistanceRange, Predicate
from patches.recipe import Band, PositionMap, ResolvedRecipe
from patches.rotary import rotary_table, rotate

T = TypeVar("T")
Table = tuple[torch.Tensor, torch.Tensor]

QUERY_BLOCK = 512
"""Queries per block: bounds a mask or a bias to [heads, 512, k] floats."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    resolved: ResolvedRecipe,
    batch: Batch,
    *,
    q_start: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention output [rows, heads, q, head_dim] in the dtype of ``query``; arguments as in the reference.

    ``batch`` keeps the tables that all layers of the forward share.
    """
    segment = _Segment(query, key, value, resolved, batch, q_start, scaling, window)
    if softcap is not None:
        return segment.softcapped(softcap)
    if segment.is_plain:
        return segment.ordinary()
    if query.shape[2] == 1 and (resolved.rotates_at == "cache_read" or len(resolved.recipe.bands) == 1):
        return segment.single_query()
    return segment.in_blocks()


class _Segment:
    """The tensors of one call, and the three routes over them."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        resolved: ResolvedRecipe,
        batch: Batch,
        q_start: int,
        scaling: float,
        window: int | None,
    ) -> None:
        self.key, self.value, self.resolved, self.batch = key, value, resolved, batch
        self.scaling, self.q_start = scaling, q_start
        self.q_stop = q_start + query.shape[2]
        self.k_start = self.q_stop - key.shape[2]
        self.window = window if window is not None and window < self.q_stop else None
        self.is_plain = resolved.is_plain and self.window is None
        self.query = self._tempered(query)

    def ordinary(self) -> torch.Tensor:
        """Plain causal attention: transformers' own SDPA call, so the result is the same to the bit."""
        new = self.query.shape[2]
        past = self.k_start < self.q_start and new > 1
        mask = self._shared("mask", self.q_start, new, self._causal_mask) if past else None
        return F.scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            attn_mask=mask,
            is_causal=mask is None and new > 1,
            scale=self.scaling,
            enable_gqa=self.query.shape[1] != self.key.shape[1],
        )

    def single_query(self) -> torch.Tensor:
        """One query. Left raw, with key j turned by minus its effective distance, one pass serves all bands."""
        if self.resolved.rotates_at == "cache_read":
            cos, sin, bias = self._shared("distance", self.q_start, 1, self._distance_table)
            key = rotate(self.key, cos, sin, interleaved=self.resolved.interleaved)
        else:
            key, bias = self.key, self._shared("bias", self.q_start, 1, self._single_bias)
        return F.scaled_dot_product_attention(
            self.query,
            key,
            self.value,
            attn_mask=bias,
            scale=self.scaling,
            enable_gqa=self.query.shape[1] != key.shape[1],
        )

    def in_blocks(self) -> torch.Tensor:
        """Blocks of queries; in each, every band attends to the keys it can reach."""
        keys = [self._rotated_keys(band) for band in self.resolved.recipe.bands]
        blocks = []
        for first in range(0, self.query.shape[2], QUERY_BLOCK):
            query = self.query[:, :, first : first + QUERY_BLOCK]
            q_low = self.q_start + first
            parts = [
                self._band(query, q_low, band, key) for band, key in zip(self.resolved.recipe.bands, keys, strict=True)
            ]
            blocks.append(self._merged([part for part in parts if part is not None]))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def softcapped(self, softcap: float) -> torch.Tensor:
        """A limit on scores (Gemma 2) has no fused kernel: eager, in the order transformers uses."""
        groups = self.query.shape[1] // self.key.shape[1]
        value = self.value.repeat_interleave(groups, 1)
        blocks = []
        for first in range(0, self.query.shape[2], QUERY_BLOCK):
            query = self.query[:, :, first : first + QUERY_BLOCK]
            q_low = self.q_start + first
            q_idx, kv_idx = self._indices(q_low, query.shape[2], self.k_start, self.q_stop)
            scores, covered = None, None
            for band in self.resolved.recipe.bands:
                key = self._rotated_keys(band).repeat_interleave(groups, 1)
                band_scores = self._rotated_queries(query, q_low, band) @ key.transpose(2, 3) * self.scaling
                inside = self._predicate(band)(q_idx, kv_idx)
                scores = band_scores if scores is None else torch.where(inside, band_scores, scores)
                covered = inside if covered is None else covered | inside
            assert scores is not None  # a recipe has at least one band
            assert covered is not None
            scores = torch.tanh(scores / softcap) * softcap
            if self.resolved.recipe.score_bias is not None:
                scores = scores + self.resolved.recipe.score_bias(q_idx, kv_idx)
            scores = scores.masked_fill(~covered, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            blocks.append(weights @ value)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    # Pieces of the block route

    def _band(self, query: torch.Tensor, q_low: int, band: Band, key: torch.Tensor) -> Attended | torch.Tensor | None:
        q_high = q_low + query.shape[2] - 1
        k_low, k_high = self._predicate(band).key_range(q_low, q_high)
        k_low, k_high = max(k_low, self.k_start), min(k_high, self.q_stop)
        if k_low >= k_high:
            return None
        columns = slice(k_low - self.k_start, k_high - self.k_start)
        bias = self._bias(band, q_low, query.shape[2], k_low, k_high)
        query = self._rotated_queries(query, q_low, band)
        key, value = key[:, :, columns], self.value[:, :, columns]
        if len(self.resolved.recipe.bands) > 1:
            return sdpa_with_lse(query, key, value, bias, self.scaling)
        groups = query.shape[1] // key.shape[1]  # masked kernels want the heads repeated, as in transformers
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scaling)

    def _merged(self, parts: list[Attended | torch.Tensor]) -> torch.Tensor:
        if isinstance(parts[0], torch.Tensor):
            return parts[0]
        return merge([part for part in parts if not isinstance(part, torch.Tensor)])

    def _bias(self, band: Band, q_low: int, queries: int, k_low: int, k_high: int) -> torch.Tensor | None:
        """Additive bias [1, heads or 1, q, k] of the band's predicate and the recipe's score bias."""
        q_idx, kv_idx = self._indices(q_low, queries, k_low, k_high)
        covered = self._predicate(band)(q_idx, kv_idx)
        score_bias = self.resolved.recipe.score_bias
        if score_bias is None and bool(covered.all()):
            return None
        excluded = torch.finfo(self.query.dtype).min
        bias = torch.zeros(covered.shape, device=covered.device) if score_bias is None else score_bias(q_idx, kv_idx)
        bias = bias.masked_fill(~covered, excluded).to(self.query.dtype)
        return bias[None, None] if bias.ndim == 2 else bias[None]

    def _predicate(self, band: Band) -> Predicate:
        return band.predicate if self.window is None else And(band.predicate, DistanceRange(0, self.window))

    # Rotation and positions

    def _rotated_keys(self, band: Band) -> torch.Tensor:
        if self.resolved.rotates_at != "cache_read":
            return self.key
        make = self._table_maker(band.key_map, self.k_start, self.q_stop)
        table = self._shared(("key", band), self.k_start, self.q_stop, make)
        return rotate(self.key, *table, interleaved=self.resolved.interleaved)

    def _rotated_queries(self, query: torch.Tensor, q_low: int, band: Band) -> torch.Tensor:
        if self.resolved.rotates_at != "cache_read":
            return query
        make = self._table_maker(band.query_map, q_low, q_low + query.shape[2])
        table = self._shared(("query", band), q_low, query.shape[2], make)
        return rotate(query, *table, interleaved=self.resolved.interleaved)

    def _table_maker(self, position_map: PositionMap, start: int, stop: int) -> Callable[[], Table]:
        def make() -> Table:
            position = torch.arange(start, stop, device=self.key.device)
            inv_freq = torch.tensor(self.resolved.inv_freq, device=self.key.device)
            factor = self.resolved.attention_factor
            return rotary_table(position_map(position), inv_freq, factor, interleaved=self.resolved.interleaved)

        return make

    def _single_bias(self) -> torch.Tensor | None:
        return self._bias(self.resolved.recipe.bands[0], self.q_start, 1, self.k_start, self.q_stop)

    def _distance_table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q_idx, kv_idx = self._indices(self.q_start, 1, self.k_start, self.q_stop)
        distance, covered = torch.zeros_like(kv_idx), torch.zeros_like(kv_idx, dtype=torch.bool)
        for band in self.resolved.recipe.bands:
            inside = self._predicate(band)(q_idx, kv_idx)
            distance = torch.where(inside, band.query_map(q_idx) - band.key_map(kv_idx), distance)
            covered = covered | inside
        inv_freq = torch.tensor(self.resolved.inv_freq, device=self.key.device)
        # The factor multiplies both the query's and the key's table, so here it enters squared.
        cos, sin = rotary_table(
            -distance[0], inv_freq, self.resolved.attention_factor**2, interleaved=self.resolved.interleaved
        )
        bias = self.resolved.recipe.score_bias
        if bias is None and bool(covered.all()):
            return cos, sin, None
        added = torch.zeros(covered.shape, device=cos.device)[None] if bias is None else bias(q_idx, kv_idx)
        added = added.masked_fill(~covered, torch.finfo(self.query.dtype).min)
        return cos, sin, added[None].to(self.query.dtype)

    def _tempered(self, query: torch.Tensor) -> torch.Tensor:
        temperature = self.resolved.recipe.attention_temperature
        if temperature is None:
            return query
        q_idx = torch.arange(self.q_start, self.q_stop, device=query.device)
        return (query * temperature(q_idx)[:, None]).to(query.dtype)

    def _causal_mask(self) -> torch.Tensor:
        q_idx, kv_idx = self._indices(self.q_start, self.query.shape[2], self.k_start, self.q_stop)
        return CAUSAL(q_idx, kv_idx)

    def _indices(self, q_low: int, queries: int, k_low: int, k_high: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.query.device
        return (
            torch.arange(q_low, q_low + queries, device=device)[:, None],
            torch.arange(k_low, k_high, device=device)[None, :],
        )

    def _shared(self, kind: Hashable, start: int, length: int, make: Callable[[], T]) -> T:
        key = (kind, self.resolved, start, length, self.k_start, self.window)
        return self.batch.shared(key, make)
