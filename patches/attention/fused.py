"""Attention of one segment on fused kernels, band by band, merged exactly by log-sum-exp.

Three routes. One identity band is ordinary attention. A single new query attends once: over keys as
they are, or over raw keys turned by their own effective distance. Anything else goes through blocks of
queries, each band over the keys that it can reach. Layers with a soft limit or with sinks, and encodings that
score distances by the query, have no fused kernel; they are in ``eager``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
import torch.nn.functional as F

from patches.attention.layer import Layer
from patches.attention.log_sum_exp import Attended, combine, has_causal_kernel, merge, sdpa_with_lse
from patches.attention.observation import Observed, observer
from patches.encoding.masks import CAUSAL, And, ChunkRange, DistanceRange, Predicate
from patches.encoding.recipe import Band, PositionMap, RelativeScores, ResolvedRecipe
from patches.encoding.rotary import per_pair, rotary_table, rotate
from patches.encoding.temperature import ConstantTemperature
from patches.model.batch import Batch

T = TypeVar("T")
Table = tuple[torch.Tensor, torch.Tensor]

QUERY_BLOCK = 256
"""Queries per block: bounds a mask or a bias to [heads, 256, k] floats."""

WORTH_A_CALL = 64
"""Keys that all queries of a block cover, from which on a call without a mask pays."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    resolved: ResolvedRecipe,
    batch: Batch,
    layer: Layer,
    *,
    q_start: int,
    head: int = 0,
) -> torch.Tensor:
    """Attention output [rows, heads, q, value dim] in the dtype of ``query``.

    ``query`` [rows, heads, q, head_dim] stands at positions q_start, q_start + 1, ...; ``key`` [rows, kv_heads,
    k, head_dim] and ``value`` end at the last of them. Keys are rotated already if the recipe rotates at
    cache-write, raw otherwise. If keys were evicted, the first ``head`` columns are those at positions
    0 .. head - 1. ``batch`` keeps the tables that all layers of the forward share.
    """
    observe = observer.get()
    if observe is not None:
        observe(Observed(query, key, resolved, layer, q_start, head))
    segment = _Segment(query, key, value, resolved, batch, layer, q_start, head)
    if layer.softcap is not None or layer.sinks is not None or resolved.recipe.relative is not None:
        return segment.eager()
    if segment.is_plain:
        return segment.ordinary()
    if query.shape[2] == 1:
        return segment.single_query()
    return segment.in_blocks()


class _Segment:
    """The tensors of one call, and the routes over them."""

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
        key, bias = self.key, self._shared("bias", self.q_start, 1, self._single_bias)
        if self.resolved.rotates_at == "cache_read":
            table = self._shared("distance", self.q_start, 1, self._distance_table)
            key = rotate(key, *table, interleaved=self.resolved.interleaved, offset=self.resolved.offset)
        return F.scaled_dot_product_attention(
            self.query,
            key,
            self.value,
            attn_mask=bias,
            scale=self.scaling,
            enable_gqa=self.query.shape[1] != key.shape[1],
        )

    def in_blocks(self) -> torch.Tensor:
        """Blocks of queries; in each, every band attends to the keys it can reach. A last band, which covers all
        keys from some distance on, is one causal triangle and takes all queries at once; so does a band from every
        chunk to one other."""
        in_blocks, at_once = [], []
        for band, key in zip(self.resolved.recipe.bands, self._keys_by_band(), strict=True):
            if self._is_triangle(band):
                at_once.append(self._triangle(band, key))
            elif self._is_chunk_to_chunk(band):
                at_once.append(self._chunk_to_chunk(band, key))
            else:
                in_blocks.append((band, key))
        blocks = []
        for first, stop in itertools.pairwise(self._edges()):
            query = self.query[:, :, first - self.q_start : stop - self.q_start]
            parts = [part for band, key in in_blocks for part in self._band(query, first, band, key)]
            blocks.append(combine(parts) if parts else self._nothing(query))
        attended = torch.cat([out for out, _ in blocks], dim=2), torch.cat([lse for _, lse in blocks], dim=2)
        return merge([attended, *at_once])

    def _edges(self) -> list[int]:
        """Positions where blocks of queries begin, and the end. No block lies across two chunks of a band."""
        sizes = {band.predicate.size for band in self.resolved.recipe.bands if isinstance(band.predicate, ChunkRange)}
        edges = [self.q_start]
        while edges[-1] < self.q_stop:
            first = edges[-1]
            edges.append(min([first + QUERY_BLOCK, self.q_stop, *((first // size + 1) * size for size in sizes)]))
        return edges

    def _is_triangle(self, band: Band) -> bool:
        predicate = band.predicate
        return (
            isinstance(predicate, DistanceRange)
            and predicate.low > 0
            and predicate.high is None
            and (self.own, self.head, self.k_start, self.resolved.recipe.score_bias) == (None, 0, 0, None)
            and self.q_stop > predicate.low
            and has_causal_kernel(self.query)
        )

    def _triangle(self, band: Band, key: torch.Tensor) -> Attended:
        """Attention to all keys at a distance of ``low`` or more: query p to keys 0 .. p - low."""
        assert isinstance(band.predicate, DistanceRange)
        low = band.predicate.low
        first = max(self.q_start, low)  # queries before it reach no key
        query = self._rotated_queries(self.query[:, :, first - self.q_start :], first, band)
        square, before = slice(first - low, self.q_stop - low), slice(0, first - low)
        parts = [sdpa_with_lse(query, key[:, :, square], self.value[:, :, square], None, self.scaling, causal=True)]
        if before.stop:
            parts.append(sdpa_with_lse(query, key[:, :, before], self.value[:, :, before], None, self.scaling))
        out, lse = combine(parts)
        missing = first - self.q_start
        return F.pad(out, (0, 0, missing, 0)), F.pad(lse, (missing, 0), value=float("-inf"))

    def _nothing(self, query: torch.Tensor) -> Attended:
        """What queries see that reach no key."""
        out = query.new_zeros(*query.shape[:3], self.value.shape[-1])
        return out, torch.full(query.shape[:3], float("-inf"), device=query.device)

    def _is_chunk_to_chunk(self, band: Band) -> bool:
        predicate = band.predicate
        return (
            isinstance(predicate, ChunkRange)
            and predicate.high == predicate.low + 1
            and self.q_start % predicate.size == 0
            and (self.q_stop - self.q_start) // predicate.size > predicate.low
            and (self.own, self.head, self.k_start, self.resolved.recipe.score_bias) == (None, 0, 0, None)
            and has_causal_kernel(self.query)
        )

    def _chunk_to_chunk(self, band: Band, key: torch.Tensor) -> Attended:
        """Every whole chunk of queries to the chunk ``low`` before it, all chunks in one call as rows of a batch. What
        is left of a last chunk goes by itself."""
        assert isinstance(band.predicate, ChunkRange)
        size, low = band.predicate.size, band.predicate.low
        stop = self.q_stop - self.q_stop % size
        first = max(self.q_start, low * size)  # queries before it reach no key
        rows, count = self.query.shape[0], (stop - first) // size

        def apart(states: torch.Tensor) -> torch.Tensor:
            return states.reshape(*states.shape[:2], count, size, -1).transpose(1, 2).flatten(0, 1)

        def together(states: torch.Tensor) -> torch.Tensor:
            return states.reshape(rows, count, *states.shape[1:]).transpose(1, 2).flatten(2, 3)

        query = self._rotated_queries(self.query[:, :, first - self.q_start : stop - self.q_start], first, band)
        columns = slice(first - low * size, stop - low * size)
        chunks = apart(query), apart(key[:, :, columns]), apart(self.value[:, :, columns])
        out, lse = (together(part) for part in sdpa_with_lse(*chunks, None, self.scaling, causal=low == 0))
        out, lse = (
            F.pad(out, (0, 0, first - self.q_start, 0)),
            F.pad(lse, (first - self.q_start, 0), value=float("-inf")),
        )
        if stop == self.q_stop:
            return out, lse
        rest = combine(self._band(self.query[:, :, stop - self.q_start :], stop, band, key))
        return torch.cat([out, rest[0]], dim=2), torch.cat([lse, rest[1]], dim=2)

    def eager(self) -> torch.Tensor:
        """Scores in the open, in blocks of queries and in the order of operations that transformers uses."""
        groups = self.query.shape[1] // self.key.shape[1]
        value = self.value.repeat_interleave(groups, 1)
        keys = [key.repeat_interleave(groups, 1) for key in self._keys_by_band()]
        blocks = []
        for first in range(0, self.query.shape[2], QUERY_BLOCK):
            query = self.query[:, :, first : first + QUERY_BLOCK]
            weights = self._weights(self._scores(query, self.q_start + first, keys)).to(query.dtype)
            blocks.append(weights @ value)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def _scores(self, query: torch.Tensor, q_low: int, keys: list[torch.Tensor]) -> torch.Tensor:
        q_idx, kv_idx = self._indices(q_low, query.shape[2], slice(None))
        scores, covered = None, None
        for band, key in zip(self.resolved.recipe.bands, keys, strict=True):
            band_scores = self._rotated_queries(query, q_low, band) @ key.transpose(2, 3) * self.scaling
            inside = self._predicate(band)(q_idx, kv_idx)
            scores = band_scores if scores is None else torch.where(inside, band_scores, scores)
            covered = inside if covered is None else covered | inside
        assert scores is not None  # a recipe has at least one band
        assert covered is not None
        if self.resolved.recipe.relative is not None:
            scores = scores + self._relative(self.resolved.recipe.relative, q_idx, kv_idx, keys[0])
        if self.layer.softcap is not None:
            scores = torch.tanh(scores / self.layer.softcap) * self.layer.softcap
        if self.resolved.recipe.score_bias is not None:
            scores = scores + self.resolved.recipe.score_bias(q_idx, kv_idx)
        return scores.masked_fill(~covered, torch.finfo(scores.dtype).min)

    def _relative(
        self, relative: RelativeScores, q_idx: torch.Tensor, kv_idx: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Some of its terms know no query, so that the temperature has to multiply the sum of all."""
        assert self.layer.attention is not None
        low = int(q_idx[0, 0]) - self.q_start
        query = self.untempered[:, :, low : low + len(q_idx)]
        scores = relative(self.layer.attention, query, key, (q_idx - kv_idx).clamp_min(0)) * self.scaling
        temperature = self.resolved.recipe.attention_temperature
        if temperature is None or isinstance(temperature, ConstantTemperature):
            return scores
        return scores * temperature(q_idx[:, 0])[:, None].to(scores.dtype)

    def _weights(self, scores: torch.Tensor) -> torch.Tensor:
        if self.layer.sinks is None:
            return torch.softmax(scores, dim=-1, dtype=torch.float32)
        nothing = self.layer.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
        logits = torch.cat([scores, nothing], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        return torch.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]

    # Pieces of the block route

    def _band(self, query: torch.Tensor, q_low: int, band: Band, key: torch.Tensor) -> list[Attended]:
        """One band's attention in up to three parts: keys that all queries cover need no mask, and masks are slow."""
        queries = query.shape[2]
        predicate = self._predicate(band)
        reached = self._columns(*predicate.key_range(q_low, q_low + queries - 1))
        full = self._columns(*predicate.full_range(q_low, q_low + queries - 1))
        if self.resolved.recipe.score_bias is not None or full.stop - full.start < WORTH_A_CALL:
            cuts = [reached]
        else:
            cuts = [slice(reached.start, full.start), full, slice(full.stop, reached.stop)]
        query = self._rotated_queries(query, q_low, band)
        parts = []
        for columns in cuts:
            if columns.start < columns.stop:
                bias = None if columns is full else self._mask(band, q_low, queries, columns)
                parts.append(sdpa_with_lse(query, key[:, :, columns], self.value[:, :, columns], bias, self.scaling))
        return parts

    def _mask(self, band: Band, q_low: int, queries: int, columns: slice) -> torch.Tensor | None:
        """``_bias`` of one band, made once per forward for all blocks and layers where distance alone decides."""

        def make() -> torch.Tensor | None:
            return self._bias([band], q_low, queries, columns)

        predicate = self._predicate(band)
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

    def _bias(self, bands: list[Band], q_low: int, queries: int, columns: slice) -> torch.Tensor | None:
        """Additive bias [1, heads or 1, q, k] of what the bands leave out and the recipe's score bias."""
        q_idx, kv_idx = self._indices(q_low, queries, columns)
        covered = torch.stack([self._predicate(band)(q_idx, kv_idx) for band in bands]).any(0)
        score_bias = self.resolved.recipe.score_bias
        if score_bias is None and bool(covered.all()):
            return None
        excluded = torch.finfo(self.query.dtype).min
        bias = torch.zeros(covered.shape, device=covered.device) if score_bias is None else score_bias(q_idx, kv_idx)
        bias = bias.masked_fill(~covered, excluded).to(self.query.dtype)
        return bias[None, None] if bias.ndim == 2 else bias[None]

    def _predicate(self, band: Band) -> Predicate:
        return band.predicate if self.own is None else And(band.predicate, self.own)

    # Rotation and positions

    def _keys_by_band(self) -> list[torch.Tensor]:
        """Keys as each band sees them; bands that place keys alike share them."""
        if self.resolved.rotates_at != "cache_read":
            return [self.key] * len(self.resolved.recipe.bands)
        turned: dict[PositionMap, torch.Tensor] = {}
        for band in self.resolved.recipe.bands:
            if band.key_map not in turned:
                table = self._table(("key", band.key_map), band.key_map, lambda: self._positions(slice(None)))
                turned[band.key_map] = self._turned(self.key, table)
        return [turned[band.key_map] for band in self.resolved.recipe.bands]

    def _rotated_queries(self, query: torch.Tensor, q_low: int, band: Band) -> torch.Tensor:
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

        return self._shared(kind, self.q_start, self.query.shape[2], make)

    def _single_bias(self) -> torch.Tensor | None:
        return self._bias(list(self.resolved.recipe.bands), self.q_start, 1, slice(None))

    def _distance_table(self) -> Table:
        """cos and sin [k, rotary_dim] of minus every key's effective distance."""
        q_idx, kv_idx = self._indices(self.q_start, 1, slice(None))
        distance = torch.zeros(1, 1, device=kv_idx.device)
        for band in self.resolved.recipe.bands:
            inside = self._predicate(band)(q_idx, kv_idx)[0, :, None]
            apart = per_pair(band.query_map(q_idx[:, 0])) - per_pair(band.key_map(kv_idx[0]))
            distance = torch.where(inside, apart, distance)
        inv_freq = torch.tensor(self.resolved.inv_freq, device=self.key.device)
        # The factor multiplies both the query's and the key's table, so here it enters squared.
        factor, layout = self.resolved.attention_factor**2, self.resolved.interleaved
        return rotary_table(-distance, inv_freq, factor, interleaved=layout)

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

    def _causal_mask(self) -> torch.Tensor:
        return CAUSAL(*self._indices(self.q_start, self.query.shape[2], slice(None)))

    def _positions(self, columns: slice) -> torch.Tensor:
        """Positions int64 of key columns."""
        tail = torch.arange(self.k_start, self.q_stop, device=self.key.device)
        if self.head == 0:
            return tail[columns]
        return torch.cat((torch.arange(self.head, device=self.key.device), tail))[columns]

    def _indices(self, q_low: int, queries: int, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        q_idx = torch.arange(q_low, q_low + queries, device=self.query.device)
        return q_idx[:, None], self._positions(columns)[None, :]

    def _shared(self, kind: Hashable, start: int, length: int, make: Callable[[], T]) -> T:
        key = (kind, self.resolved, start, length, self.k_start, self.head, self.own)
        return self.batch.shared(key, make)
