"""Attention of a packed row: its sequences one after another, each through its cache, under the recipe of its slot."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from patches.attention.decode.plan import Plan, Row, States
from patches.attention.decode.shared import NONE, Cached
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import widened
from patches.attention.observation import Observer
from patches.attention.paged.batch import PagedBatch
from patches.batch.segments import Batch, packed_lengths
from patches.model.attention.in_place import LayerInPlace, LayersInPlace
from patches.model.attention.planning import Planning
from patches.model.attention.segment_attention import SegmentAttention, num_sinks_of
from patches.model.forward import Forwards
from patches.model.measuring.measurement import Measurement


class PackedAttention:
    """The attention of every layer of one model, in batches of one packed row."""

    def __init__(
        self,
        layers: int,
        shared: Mapping[int, int],
        measurement: Measurement,
        segments: SegmentAttention,
        forwards: Forwards,
    ) -> None:
        """Layers that are ``shared`` have the pages of an earlier one, which writes them."""
        self._segments, self._forwards = segments, forwards
        own = [layer for layer in range(layers) if layer not in shared]
        self._layers, self._shared = len(own), shared
        self._with_pages = {layer: own.index(shared.get(layer, layer)) for layer in range(layers)}
        self._cached_as, self._calls = measurement.cached, measurement.cached.calls
        self.rows = segments.rows

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Layer,
        index: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output [1, tokens, heads, value dim] of the new states [1, heads, tokens, dim], with those in the cache.

        ``sinks`` are those of the ``layer``, which stays the same from step to step.
        """
        forward = self._forwards.current
        batch, paged, observer = forward.packed, forward.paged, forward.observer
        assert batch is not None, "the forward is of a padded batch"
        kept: LayersInPlace | None = None if batch.places is None or observer is not None else paged["cache"].kept
        if kept is not None:
            known = kept.layers.get(index)
            if known is not None and known.has_begun(layer, batch):
                return known.attend(query, key, value)
        if sinks is not None:
            layer = replace(layer, sinks=sinks)
        if isinstance(batch, PagedBatch):
            return self._attend_pages(query, key, value, batch, dict(paged), layer, index)
        row, cached = self._cached(key, value, forward.rows, batch, paged, index)
        decided = partial(self._decided, layer, index, observer)
        if observer is None and layer.is_ordinary:
            planning = Planning(self._segments, row, layer, self._segments.role(index), query, cached)
            plan = planning.plan(None if kept is None else kept.decoding)
            if kept is not None and self._calls == 1:
                kept.layers[index] = LayerInPlace(layer, cached, kept.decoding[planning.kind], decided)
        else:
            plan = Plan(NONE, [(number, None) for number in range(len(batch.segments))], None)
        return plan.attend(row, query, cached, layer.scaling, decided)

    def _decided(
        self, layer: Layer, index: int, observer: Observer | None, row: Row, number: int, states: States
    ) -> torch.Tensor:
        """Output [1, heads, tokens, value dim] of one sequence by its ``number``, as this layer decides."""
        segment = row.batch.segments[number]
        recipe = self._segments.recipe(self._segments.role(index), segment.slot)
        num_sinks = num_sinks_of(recipe, layer, states[1].shape[2], segment.q_stop) or 0
        return self._segments.attend(states, segment, row.batch, layer, index, observer, num_sinks)

    def _attend_pages(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
        paged: dict[str, Any],
        layer: Layer,
        index: int,
    ) -> torch.Tensor:
        """As ``attend``, from the pages themselves once they have the new keys and values."""
        paged["cache"].update(key, value, self._layer_in_cache(batch, index), paged)  # puts its pages into ``paged``
        pages = _unpacked(paged["k_cache"], key), _unpacked(paged["v_cache"], value)
        role, group = self._segments.role(index), paged.get("group", 0)
        if index not in self._shared:
            batch.write(key[0].transpose(0, 1), value[0].transpose(0, 1), pages, group)
        return batch.attend(query[0].transpose(0, 1), pages, layer, role, self.rows, group)[None]

    def _cached(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: dict[Hashable, Row],
        batch: Batch,
        paged: Mapping[str, Any],
        index: int,
    ) -> tuple[Row, Cached]:
        """The row, and keys and values [heads, keys, dim] of its sequences, those in a cache included."""
        if batch.places is not None:
            cache, layer = paged["cache"], self._layer_in_cache(batch, index)
            keys, values = cache.write(self._packed(key), self._packed(value), layer, paged)
            if "in place" not in rows:
                lengths = packed_lengths(batch, cache.key_edges(paged))
                rows["in place"] = Row(batch, *lengths, cache.places_written(paged), cache.spare_places)
            return rows["in place"], (keys[..., : key.shape[-1]], values[..., : value.shape[-1]])
        if "cache" in paged:
            paged, layer = dict(paged), self._layer_in_cache(batch, index)  # the cache writes its edges into it
            whole = paged["cache"].update(self._packed(key), self._packed(value), layer, paged)
            key, value = (
                _unpacked(row.transpose(1, 2), own).transpose(1, 2)
                for row, own in zip(whole, (key, value), strict=True)
            )
        edges: torch.Tensor = paged["cu_seq_lens_k"]
        if edges.data_ptr() not in rows:
            rows[edges.data_ptr()] = Row(batch, *packed_lengths(batch, edges))
        return rows[edges.data_ptr()], (key[0], value[0])

    def _layer_in_cache(self, batch: Batch, index: int) -> int:
        """A layer that attends again in a forward is another layer of the cache."""
        return self._with_pages[index] + (self._layers * batch.calls_before(index) if self._calls > 1 else 0)

    def _packed(self, states: torch.Tensor) -> torch.Tensor:
        """``states`` [1, heads, tokens, dim] in the heads and the width of the cache. With fewer heads, a row has the
        numbers of the token one after another."""
        heads, width = self._cached_as.heads, self._cached_as.width
        if states.shape[1] == heads:
            return widened(states, width)
        row = widened(states.transpose(1, 2).flatten(2), heads * width)
        return row.view(*row.shape[:2], heads, width).transpose(1, 2)


def _unpacked(rows: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """``rows`` [..., heads, width] of the cache as [..., heads, dim] of ``states`` [1, heads, tokens, dim]."""
    heads, dim = states.shape[1], states.shape[-1]
    if rows.shape[-2] == heads:
        return rows if rows.shape[-1] == dim else rows[..., :dim]
    shape = *rows.shape[:-2], heads, dim
    return rows.flatten(-2)[..., : heads * dim].view(shape)
