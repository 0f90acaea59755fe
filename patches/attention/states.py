"""The tensors of one segment in one layer, and the rotated states that several routes need."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from patches.attention.decode.tables import Table, moved, rotation
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import has_kernel
from patches.attention.positions import SegmentPositions
from patches.batch.segments import Batch
from patches.encoding.bands import Band, PositionMap
from patches.encoding.recipe import ResolvedRecipe
from patches.encoding.rotary import turn

T = TypeVar("T")


class SegmentStates(SegmentPositions):
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
        queries = range(q_start, q_start + query.shape[2])
        super().__init__(resolved, layer, queries, key.shape[2], num_sinks, query.dtype, query.device)
        self.key, self.value, self.batch = key, value, batch
        self.is_plain = resolved.is_plain and self.layer_mask is None and num_sinks == 0
        self.untempered = query
        multiplier, factor = self.temperature
        self.scaling = layer.scaling * multiplier
        self.query = query if factor is None else (query * factor).to(query.dtype)

    @property
    def is_bare(self) -> bool:
        """True if a kernel for long calls exists and bands alone decide over pairs.

        The layer then has no mask, the recipe no bias, and the keys are complete from position 0 on.
        """
        bare = (self.layer_mask, self.num_sinks, self.k_start, self.resolved.recipe.score_bias) == (None, 0, 0, None)
        return bare and has_kernel(self.query, self.key, self.value)

    def keys(self, band: Band, columns: slice) -> torch.Tensor:
        """Keys of ``columns`` as ``band`` sees them."""
        key = self.key[:, :, columns]
        if self.is_as_written(band.key_map):
            return key
        kind = ("key", band.key_map, columns.start, columns.stop)
        return self.turn(key, self.shared(kind, lambda: self._moving(band.key_map, self.positions(columns))))

    def queries(self, query: torch.Tensor, q_low: int, band: Band) -> torch.Tensor:
        """``query`` at positions q_low, q_low + 1, ... as ``band`` sees it."""
        if self.is_as_written(band.query_map):
            return query
        stop = q_low + query.shape[2]
        kind = ("query", band.query_map, q_low, stop)
        q_idx = torch.arange(q_low, stop, device=query.device)
        return self.turn(query, self.shared(kind, lambda: self._moving(band.query_map, q_idx)))

    def _moving(self, to: PositionMap, position: torch.Tensor) -> Table:
        """The rotation of states from their ``position`` under the base to that under ``to``."""
        by = moved(to, self.resolved.recipe.base, position)
        return rotation(by, self.resolved.turns, self.resolved.interleaved)

    def turn(self, states: torch.Tensor, table: Table) -> torch.Tensor:
        """``states`` [rows, heads, n, head_dim], rotated by ``table``."""
        return turn(states, *table, interleaved=self.resolved.interleaved, offset=self.resolved.offset)

    def tempered(self, logits: torch.Tensor, q_low: int) -> torch.Tensor:
        """``logits`` [rows, heads, q, k] of the queries q_low, q_low + 1, ... times every temperature."""
        q_idx = torch.arange(q_low, q_low + logits.shape[2], device=logits.device)
        for temperature in (self.layer.temperature, self.resolved.recipe.attention_temperature):
            if temperature is not None:
                logits = (logits * temperature(q_idx)[:, None]).to(logits.dtype)
        return logits

    def shared(self, kind: Hashable, make: Callable[[], T]) -> T:
        """``make()`` once per forward for all layers that see the same positions."""
        key = (kind, self.resolved, self.q_start, self.q_stop, self.k_start, self.num_sinks, self.layer_mask)
        return self.batch.shared(key, make)
