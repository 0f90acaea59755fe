"""The positions of one segment in one layer: which keys each band reaches, and what else depends on positions alone."""

from __future__ import annotations

import torch

from patches.attention.layer import Layer
from patches.encoding.bands import Band, PositionMap
from patches.encoding.masks import And, Predicate
from patches.encoding.recipe import ResolvedRecipe
from patches.encoding.temperature import ConstantTemperature


class SegmentPositions:
    """Queries at the positions ``queries``, and ``length`` keys that end at the last of them.

    If keys were evicted, the first ``num_sinks`` of them are those at positions 0 .. num_sinks - 1. States have this
    ``dtype`` and ``device``.
    """

    def __init__(
        self,
        resolved: ResolvedRecipe,
        layer: Layer,
        queries: range,
        length: int,
        num_sinks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.resolved, self.layer, self.length, self.num_sinks = resolved, layer, length, num_sinks
        self.dtype, self.device = dtype, device
        self.q_start, self.q_stop = queries.start, queries.stop
        self.k_start = self.q_stop - length + num_sinks
        self.layer_mask = None if layer.mask.is_causal_below(self.q_stop) else layer.mask

    @property
    def q_idx(self) -> torch.Tensor:
        """Positions int64 of the queries."""
        return torch.arange(self.q_start, self.q_stop, device=self.device)

    def bias(self, bands: list[Band], q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        """Additive bias [1, heads or 1, q, k]: pairs that no band covers, and the recipe's score bias.

        ``q_idx`` int64 [q, 1] and ``kv_idx`` int64 [1, k] are positions.
        """
        covered = torch.stack([self.predicate(band)(q_idx, kv_idx) for band in bands]).any(0)
        score_bias, excluded = self.resolved.recipe.score_bias, torch.finfo(self.dtype).min
        bias = torch.zeros(covered.shape, device=self.device) if score_bias is None else score_bias(q_idx, kv_idx)
        bias = bias.to(self.dtype).masked_fill(~covered, excluded)
        return bias[None, None] if bias.ndim == 2 else bias[None]

    def predicate(self, band: Band) -> Predicate:
        return band.predicate if self.layer_mask is None else And(band.predicate, self.layer_mask)

    def is_as_written(self, position_map: PositionMap) -> bool:
        """True if queries or keys under ``position_map`` are read as they were written, under the base."""
        base = self.resolved.recipe.base
        return position_map is base or position_map == base

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

    def reached(self) -> list[tuple[Band, slice]]:
        """Bands that some query of the segment reaches keys in, with the columns of these keys."""
        low, high = self.q_start, self.q_stop - 1
        bands = self.resolved.recipe.bands
        reached = [(band, self.columns(*self.predicate(band).key_range(low, high))) for band in bands]
        return [(band, columns) for band, columns in reached if columns.start < columns.stop]

    def columns(self, k_low: int, k_high: int) -> slice:
        """Key columns of positions k_low .. k_high - 1, as far as the cache still has them."""
        return slice(self._column(k_low), self._column(k_high))

    def _column(self, position: int) -> int:
        if position < self.num_sinks:
            return position
        return min(max(position - self.k_start, 0) + self.num_sinks, self.length)

    def position(self, column: int) -> int:
        """Position of a key column."""
        return column if column < self.num_sinks else column - self.num_sinks + self.k_start

    def spans(self, columns: slice) -> list[range]:
        """Positions of key columns, in at most two spans."""
        own = range(self.length)[columns]
        ends = own.start, min(max(own.start, self.num_sinks), own.stop), own.stop
        moved = self.k_start - self.num_sinks
        spans = [range(ends[0], ends[1]), range(ends[1] + moved, ends[2] + moved)]
        return [span for span in spans if span]

    def positions(self, columns: slice) -> torch.Tensor:
        """Positions int64 of key columns."""
        spans = [torch.arange(span.start, span.stop, device=self.device) for span in self.spans(columns)]
        return spans[0] if len(spans) == 1 else torch.cat(spans)

    def indices(self, q_low: int, queries: int, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        q_idx = torch.arange(q_low, q_low + queries, device=self.device)
        return q_idx[:, None], self.positions(columns)[None, :]
