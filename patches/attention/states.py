"""The tensors of one segment in one layer, with the masks, rotated states and positions that several routes need."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from patches.attention.decode.tables import Table, rotation
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import has_kernel
from patches.batch.segments import Batch
from patches.encoding.masks import And, Predicate
from patches.encoding.recipe import Band, PositionMap, ResolvedRecipe
from patches.encoding.rotary import per_pair, turn
from patches.encoding.temperature import ConstantTemperature

T = TypeVar("T")


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
        num_sinks: int,
    ) -> None:
        self.key, self.value, self.resolved, self.batch, self.layer = key, value, resolved, batch, layer
        self.q_start, self.q_stop = q_start, q_start + query.shape[2]
        self.num_sinks, self.k_start = num_sinks, self.q_stop - key.shape[2] + num_sinks
        self.layer_mask = None if layer.mask.is_causal_below(self.q_stop) else layer.mask
        self.is_plain = resolved.is_plain and self.layer_mask is None and num_sinks == 0
        self.untempered = query
        multiplier, factor = self.temperature
        self.scaling = layer.scaling * multiplier
        self.query = query if factor is None else (query * factor).to(query.dtype)

    @property
    def q_idx(self) -> torch.Tensor:
        """Positions int64 of the queries."""
        return torch.arange(self.q_start, self.q_stop, device=self.key.device)

    @property
    def is_bare(self) -> bool:
        """True if a kernel for long calls exists and bands alone decide over pairs.

        The layer then has no mask, the recipe no bias, and the keys are complete from position 0 on.
        """
        bare = (self.layer_mask, self.num_sinks, self.k_start, self.resolved.recipe.score_bias) == (None, 0, 0, None)
        return bare and has_kernel(self.query, self.key, self.value)

    def bias(self, bands: list[Band], q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        """Additive bias [1, heads or 1, q, k]: pairs that no band covers, and the recipe's score bias.

        ``q_idx`` int64 [q, 1] and ``kv_idx`` int64 [1, k] are positions.
        """
        covered = torch.stack([self.predicate(band)(q_idx, kv_idx) for band in bands]).any(0)
        score_bias, excluded = self.resolved.recipe.score_bias, torch.finfo(self.query.dtype).min
        bias = torch.zeros(covered.shape, device=covered.device) if score_bias is None else score_bias(q_idx, kv_idx)
        bias = bias.to(self.query.dtype).masked_fill(~covered, excluded)
        return bias[None, None] if bias.ndim == 2 else bias[None]

    def predicate(self, band: Band) -> Predicate:
        return band.predicate if self.layer_mask is None else And(band.predicate, self.layer_mask)

    def is_as_written(self, position_map: PositionMap) -> bool:
        """True if queries or keys under ``position_map`` are read as they were written, under the base."""
        return not self.resolved.rotates or position_map == self.resolved.recipe.base

    def keys(self, band: Band, columns: slice) -> torch.Tensor:
        """Keys of ``columns`` as ``band`` sees them."""
        key = self.key[:, :, columns]
        if self.is_as_written(band.key_map):
            return key
        kind = ("key", band.key_map, columns.start, columns.stop)
        return self.turn(key, self.shared(kind, lambda: self.table(self.moved(band.key_map, self.positions(columns)))))

    def queries(self, query: torch.Tensor, q_low: int, band: Band) -> torch.Tensor:
        """``query`` at positions q_low, q_low + 1, ... as ``band`` sees it."""
        if self.is_as_written(band.query_map):
            return query
        stop = q_low + query.shape[2]
        kind = ("query", band.query_map, q_low, stop)
        q_idx = torch.arange(q_low, stop, device=query.device)
        return self.turn(query, self.shared(kind, lambda: self.table(self.moved(band.query_map, q_idx))))

    def moved(self, position_map: PositionMap, position: torch.Tensor) -> torch.Tensor:
        """Positions [n, 1 or pairs] from those of the base to those of ``position_map``."""
        return per_pair(position_map(position)) - per_pair(self.resolved.recipe.base(position))

    def table(self, by: torch.Tensor) -> Table:
        """The rotation of states by ``by`` positions [n, 1 or pairs]: cos and ``signed`` sin."""
        return rotation(by, self.resolved.turns, self.resolved.interleaved)

    def turn(self, states: torch.Tensor, table: Table) -> torch.Tensor:
        """``states`` [rows, heads, n, head_dim], rotated by ``table``."""
        return turn(states, *table, interleaved=self.resolved.interleaved, offset=self.resolved.offset)

    @property
    def temperature(self) -> tuple[float, torch.Tensor | None]:
        """Factor on scores, and that on queries [q, 1] of what depends on their positions."""
        multiplier, factor = 1.0, None
        for temperature in (self.layer.temperature, self.resolved.recipe.attention_temperature):
            if isinstance(temperature, ConstantTemperature):
                multiplier *= temperature.multiplier
            elif temperature is not None:
                own = temperature(self.q_idx)[:, None]
                factor = own if factor is None else factor * own
        return multiplier, factor

    def tempered(self, logits: torch.Tensor, q_low: int) -> torch.Tensor:
        """``logits`` [rows, heads, q, k] of the queries q_low, q_low + 1, ... times every temperature."""
        q_idx = torch.arange(q_low, q_low + logits.shape[2], device=logits.device)
        for temperature in (self.layer.temperature, self.resolved.recipe.attention_temperature):
            if temperature is not None:
                logits = (logits * temperature(q_idx)[:, None]).to(logits.dtype)
        return logits

    def reached(self) -> dict[Band, slice]:
        """Key columns that some query of the segment reaches in a band, for all bands that reach any."""
        low, high = self.q_start, self.q_stop - 1
        bands = self.resolved.recipe.bands
        reached = {band: self.columns(*self.predicate(band).key_range(low, high)) for band in bands}
        return {band: columns for band, columns in reached.items() if columns.start < columns.stop}

    def columns(self, k_low: int, k_high: int) -> slice:
        """Key columns of positions k_low .. k_high - 1, as far as the cache still has them."""
        return slice(self._column(k_low), self._column(k_high))

    def _column(self, position: int) -> int:
        if position < self.num_sinks:
            return position
        return min(max(position - self.k_start, 0) + self.num_sinks, self.key.shape[2])

    def position(self, column: int) -> int:
        """Position of a key column."""
        return column if column < self.num_sinks else column - self.num_sinks + self.k_start

    def positions(self, columns: slice) -> torch.Tensor:
        """Positions int64 of key columns."""
        if self.num_sinks == 0:
            own = range(self.k_start, self.q_stop)[columns]
            return torch.arange(own.start, own.stop, device=self.key.device)
        tail = torch.arange(self.k_start, self.q_stop, device=self.key.device)
        return torch.cat((torch.arange(self.num_sinks, device=self.key.device), tail))[columns]

    def indices(self, q_low: int, queries: int, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        q_idx = torch.arange(q_low, q_low + queries, device=self.query.device)
        return q_idx[:, None], self.positions(columns)[None, :]

    def shared(self, kind: Hashable, make: Callable[[], T]) -> T:
        """``make()`` once per forward for all layers that see the same positions."""
        key = (kind, self.resolved, self.q_start, self.q_stop, self.k_start, self.num_sinks, self.layer_mask)
        return self.batch.shared(key, make)
