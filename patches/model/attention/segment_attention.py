"""Attention of one segment: its encoding in a layer, and the call that every batch makes in the end."""

from __future__ import annotations

from functools import lru_cache

import torch

from patches.attention import fused
from patches.attention.layer import Layer
from patches.attention.observation import Observed, Observer
from patches.attention.paged import in_place
from patches.attention.paged.batch import ModelRows, Role
from patches.attention.paged.tables import Pairs
from patches.batch.segments import Batch, Segment
from patches.batch.slots import MAX_SLOTS, SlotTable
from patches.encoding.masks import CAUSAL
from patches.encoding.recipe import Recipe, ResolvedRecipe
from patches.model.measuring.measurement import Measurement

PLAIN = ResolvedRecipe(Recipe(None), (), 1.0, 0.0, None)
"""The recipe of layers with another rotary type: their keys are rotated, the rest is ordinary attention."""


class SegmentAttention:
    """The encodings of one model's layers. A layer's role and a slot decide."""

    def __init__(self, measurement: Measurement, heads: slice | None, slots: SlotTable) -> None:
        """``heads`` are those of this rank, None for all."""
        self._roles, self._compressed, self._slots = measurement.roles, measurement.compressed, slots
        self._of_rank = None if heads is None else lru_cache(2 * MAX_SLOTS)(lambda resolved: resolved.of_heads(heads))
        self.reads_in_place = False
        geometry = measurement.geometry
        self.rows = ModelRows(
            self.recipe, Pairs(geometry.rotary_dim // 2, geometry.interleaved, geometry.rotary_offset)
        )

    def role(self, index: int) -> Role:
        return self._roles.get(index, "slots"), index in self._compressed

    def recipe(self, role: Role, slot: int) -> ResolvedRecipe:
        """The encoding of a slot in layers of a role."""
        kind, is_compressed = role
        if kind == "own":
            return PLAIN
        resolved = self._slots[slot] if kind == "slots" else self._slots[slot].unrotated
        if self._of_rank is not None:
            resolved = self._of_rank(resolved)
        return resolved.unmasked if is_compressed else resolved

    def attend(
        self,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        segment: Segment,
        batch: Batch,
        layer: Layer,
        index: int,
        observer: Observer | None,
        num_sinks: int = 0,
    ) -> torch.Tensor:
        """Attention [rows, heads, q, value dim] of one segment's query, key and value."""
        recipe, (query, key, value) = self.recipe(self.role(index), segment.slot), states
        if observer is not None:
            observer(Observed(query, key, recipe, layer, segment.q_start, num_sinks))
        is_whole = key.shape[2] == segment.q_stop  # nothing was evicted, and the layer caches more than a window
        if self.reads_in_place and is_whole and in_place.is_faster(query, key, value, recipe, layer):
            return in_place.attend(query, key, value, segment, batch, layer, self.role(index), self.rows)
        start = segment.q_start
        return fused.attend(query, key, value, recipe, batch, layer, q_start=start, num_sinks=num_sinks)


def num_sinks_of(resolved: ResolvedRecipe, layer: Layer, num_kv: int, q_stop: int) -> int | None:
    """Number of first keys before a gap, where the cache has evicted keys out of reach; None: nothing is evicted, or
    the layer has a window."""
    sink_window = resolved.recipe.sink_window if num_kv < q_stop and layer.mask is CAUSAL else None
    return None if sink_window is None else sink_window[0]
