"""The tensors of one segment in one layer, and what every route over them needs: masks, rotated states, positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch

from patches.attention.layer import Layer
from patches.attention.log_sum_exp import Attended, add, has_kernel, part, sdpa_with_lse
from patches.batch.segments import Batch
from patches.encoding.masks import And, ChunkRange, Predicate
from patches.encoding.recipe import Band, PositionMap, ResolvedRecipe
from patches.encoding.rotary import per_pair, rotary_table, rotate
from patches.encoding.temperature import ConstantTemperature

T = TypeVar("T")
Table = tuple[torch.Tensor, torch.Tensor]

QUERY_BLOCK = 256
"""Queries per block: bounds a mask or a bias to [heads, 256, k] floats."""

WORTH_A_CALL = 64
"""Keys that all queries of a block cover, from which on a call without a mask pays."""


class SegmentStates:
    """Queries, keys and values as ``patches.attention.fused.attend`` gets them."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        resolved: ResolvedRecipe,
        batch: Batch,
        layer: Layer,
        q_start: int,
        head: int,
    ) -> None:
        self.key, self.value, self.resolved, self.batch, self.layer = key, value, resolved, batch, layer
        self.q_start, self.q_stop = q_start, q_start + query.shape[2]
        self.head, self.k_start = head, self.q_stop - key.shape[2] + head
        self.own = None if layer.own.is_causal_below(self.q_stop) else layer.own
        self.is_plain = resolved.is_plain and self.own is None and head == 0
        self.untempered = query
        self.scaling, self.query = self._tempered(query)

    @property
    def is_bare(self) -> bool:
        """Whether bands alone decide over pairs: no mask of the layer, no bias, and every key from position 0 on. And
        whether there is a kernel for long calls."""
        bare = (self.own, self.head, self.k_start, self.resolved.recipe.score_bias) == (None, 0, 0, None)
        return bare and has_kernel(self.query, self.key, self.value)

    def blocks(self) -> Iterator[slice]:
        """Blocks of query columns. None lies across two chunks of a band."""
        sizes = {band.predicate.size for band in self.resolved.recipe.bands if isinstance(band.predicate, ChunkRange)}
        first = self.q_start
        while first < self.q_stop:
            stop = min([first + QUERY_BLOCK, self.q_stop, *((first // size + 1) * size for size in sizes)])
            yield slice(first - self.q_start, stop - self.q_start)
            first = stop

    # One band

    def add_band(self, columns: slice, band: Band, key: torch.Tensor, attended: Attended) -> None:
        """Add what the queries of ``columns`` see of ``key`` in one band, in up to three parts: keys that all of them
        cover need no mask, and masks are slow."""
        query, q_low = self.query[:, :, columns], self.q_start + columns.start
        queries = query.shape[2]
        predicate = self.predicate(band)
        reached = self._columns(*predicate.key_range(q_low, q_low + queries - 1))
        full = self._columns(*predicate.full_range(q_low, q_low + queries - 1))
        if self.resolved.recipe.score_bias is not None or full.stop - full.start < WORTH_A_CALL:
            cuts = [reached]
        else:
            cuts = [slice(reached.start, full.start), full, slice(full.stop, reached.stop)]
        query = self.rotated_queries(query, q_low, band)
        for cut in cuts:
            if cut.start < cut.stop:
                bias = None if cut is full else self._mask(band, q_low, queries, cut)
                new = sdpa_with_lse(query, key[:, :, cut], self.value[:, :, cut], bias, self.scaling)
                add(part(attended, columns), *new)

    def _mask(self, band: Band, q_low: int, queries: int, columns: slice) -> torch.Tensor | None:
        """``bias`` of one band, made once per forward for all blocks and layers where distance alone decides."""

        def make() -> torch.Tensor | None:
            return self.bias([band], q_low, queries, columns)

        predicate = self.predicate(band)
        if self.head or self.resolved.recipe.score_bias is not None or not predicate.by_distance:
            return make()
        distance = q_low - (self.k_start + columns.start)
        key = ("mask", predicate, distance, queries, columns.stop - columns.start, self.query.dtype)
        return self.batch.shared(key, make)

    def _columns(self, k_low: int, k_high: int) -> slice:
        """Key columns that hold positions k_low .. k_high - 1, of those still in the cache."""

        def column(position: int) -> int:
            if position < self.head:
                return position
            return min(max(position - self.k_start, 0) + self.head, self.key.shape[2])

        return slice(column(k_low), column(k_high))

    def bias(self, bands: list[Band], q_low: int, queries: int, columns: slice) -> torch.Tensor | None:
        """Additive bias [1, heads or 1, q, k] of what the bands leave out and the recipe's score bias."""
        q_idx, kv_idx = self.indices(q_low, queries, columns)
        covered = torch.stack([self.predicate(band)(q_idx, kv_idx) for band in bands]).any(0)
        score_bias = self.resolved.recipe.score_bias
        if score_bias is None and bool(covered.all()):
            return None
        excluded = torch.finfo(self.query.dtype).min
        bias = torch.zeros(covered.shape, device=covered.device) if score_bias is None else score_bias(q_idx, kv_idx)
        bias = bias.to(self.query.dtype).masked_fill(~covered, excluded)
        return bias[None, None] if bias.ndim == 2 else bias[None]

    def predicate(self, band: Band) -> Predicate:
        return band.predicate if self.own is None else And(band.predicate, self.own)

    # Rotation and positions

    def keys_by_band(self) -> list[torch.Tensor]:
        """Keys as each band sees them; bands that place keys alike share them."""
        if self.resolved.rotates_at != "cache_read":
            return [self.key] * len(self.resolved.recipe.bands)
        turned: dict[PositionMap, torch.Tensor] = {}
        for band in self.resolved.recipe.bands:
            if band.key_map not in turned:
                table = self._table(("key", band.key_map), band.key_map, lambda: self.positions(slice(None)))
                turned[band.key_map] = self._turned(self.key, table)
        return [turned[band.key_map] for band in self.resolved.recipe.bands]

    def rotated_queries(self, query: torch.Tensor, q_low: int, band: Band) -> torch.Tensor:
        if self.resolved.rotates_at != "cache_read":
            return query
        stop = q_low + query.shape[2]
        kind = ("query", band.query_map, q_low, stop)
        table = self._table(kind, band.query_map, lambda: torch.arange(q_low, stop, device=query.device))
        return self._turned(query, table)

    def _turned(self, states: torch.Tensor, table: Table) -> torch.Tensor:
        return rotate(states, *table, interleaved=self.resolved.interleaved, offset=self.resolved.offset)

    def _table(self, kind: Hashable, position_map: PositionMap, positions: Callable[[], torch.Tensor]) -> Table:
        def make() -> Table:
            inv_freq = torch.tensor(self.resolved.inv_freq, device=self.key.device)
            factor, layout = self.resolved.attention_factor, self.resolved.interleaved
            return rotary_table(per_pair(position_map(positions())), inv_freq, factor, interleaved=layout)

        return self.shared(kind, make)

    def _tempered(self, query: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Factor on scores, and the queries multiplied by what depends on their positions."""
        scaling = self.layer.scaling
        for temperature in (self.layer.temperature, self.resolved.recipe.attention_temperature):
            if isinstance(temperature, ConstantTemperature):
                scaling *= temperature.multiplier
            elif temperature is not None:
                q_idx = torch.arange(self.q_start, self.q_stop, device=query.device)
                query = (query * temperature(q_idx)[:, None]).to(query.dtype)
        return scaling, query

    def positions(self, columns: slice) -> torch.Tensor:
        """Positions int64 of key columns."""
        tail = torch.arange(self.k_start, self.q_stop, device=self.key.device)
        if self.head == 0:
            return tail[columns]
        return torch.cat((torch.arange(self.head, device=self.key.device), tail))[columns]

    def indices(self, q_low: int, queries: int, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        q_idx = torch.arange(q_low, q_low + queries, device=self.query.device)
        return q_idx[:, None], self.positions(columns)[None, :]

    def shared(self, kind: Hashable, make: Callable[[], T]) -> T:
        """``make()`` once per forward for all layers that see the same positions."""
        key = (kind, self.resolved, self.q_start, self.q_stop, self.k_start, self.head, self.own)
        return self.batch.shared(key, make)
