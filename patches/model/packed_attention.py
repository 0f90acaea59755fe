"""Attention of a packed row: its sequences one after another, each through its cache, under the recipe of its slot.

While a few sequences decode, the Python between two products of the model takes as long as the mathematics. So a step
decides once, for all layers alike, how each sequence reads its keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from patches.attention.layer import Layer
from patches.attention.log_sum_exp import widened
from patches.attention.paged.batch import ModelRows, PagedBatch, Role
from patches.attention.paged.tables import Pairs
from patches.attention.single_query import ORDINARY, Reading, read, reading_of
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch, packed_lengths
from patches.model.forward import Forwards
from patches.model.measurement import Measurement
from patches.model.segment_attention import SegmentAttention, num_sinks_of


class PackedAttention:
    """The attention of every layer of one model, in batches of one packed row."""

    def __init__(self, layers: int, measurement: Measurement, segments: SegmentAttention, forwards: Forwards) -> None:
        self._layers, self._segments, self._forwards = layers, segments, forwards
        self._width, self._calls = measurement.cached.width, measurement.cached.calls
        geometry = measurement.geometry
        pairs = Pairs(geometry.rotary_dim // 2, geometry.interleaved, geometry.rotary_offset)
        self.rows = ModelRows(segments.recipe, pairs)

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
        batch, paged = forward.packed, dict(forward.paged)  # the cache writes what belongs to this layer into it
        assert batch is not None, "the forward is of a padded batch"
        if sinks is not None:
            layer = replace(layer, sinks=sinks)
        if isinstance(batch, PagedBatch):
            return self._attend_pages(query, key, value, batch, paged, layer, index)
        states = self._sequences(query, key, value, batch, paged, index)
        role = self._segments.role(index)
        readings: list[Reading | None] = [None] * len(states)
        if forward.observer is None and layer.is_ordinary:
            kind = role, layer.mask, paged["cu_seq_lens_k"].data_ptr()
            readings = batch.shared(kind, lambda: self._readings(states, batch, layer, role))
        attended = []
        for segment, own, reading in zip(batch.segments, states, readings, strict=True):
            if reading is not None:
                attended.append(read(*own, layer.scaling, reading))
                continue
            recipe = self._segments.recipe(role, segment.slot)
            num_sinks = num_sinks_of(recipe, layer, own[1].shape[2], segment.q_stop) or 0
            attended.append(self._segments.attend(own, segment, batch, layer, index, forward.observer, num_sinks))
        joined = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
        return joined.transpose(1, 2).contiguous()

    def _readings(
        self,
        states: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        batch: Batch,
        layer: Layer,
        role: Role,
    ) -> list[Reading | None]:
        """The reading of each segment with a single query, None for others.

        It is the same in layers of one role and window. Decoding many sequences asks this most often.
        """
        readings: list[Reading | None] = []
        for segment, own in zip(batch.segments, states, strict=True):
            recipe, start = self._segments.recipe(role, segment.slot), segment.q_start
            if own[0].shape[2] > 1 or recipe.recipe.relative is not None:
                readings.append(None)
            elif recipe.is_plain and not recipe.recipe.attention_temperature and layer.mask.is_causal_below(start + 1):
                readings.append(ORDINARY)
            else:
                num_sinks = num_sinks_of(recipe, layer, own[1].shape[2], segment.q_stop) or 0
                readings.append(reading_of(SegmentStates(*own, recipe, batch, layer, start, num_sinks)))
        return readings

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
        new = self._through_cache(key, value, batch, paged, index)
        pages = paged["k_cache"][..., : key.shape[-1]], paged["v_cache"][..., : value.shape[-1]]
        for states, target in zip(new, pages, strict=True):
            batch.step.write(states[0].transpose(0, 1), target)
        return batch.attend(query[0].transpose(0, 1), *pages, layer, self._segments.role(index), self.rows)[None]

    def _sequences(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        paged: dict[str, Any],
        index: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Query, keys and values of every sequence, with those in its cache, if it has one."""
        keys: Sequence[torch.Tensor]
        values: Sequence[torch.Tensor]
        if batch.places is None:
            if "cache" in paged:
                key, value = self._through_cache(key, value, batch, paged, index)
            new, num_kv = _lengths(batch, paged)
            keys, values = _divided(key, num_kv), _divided(value, num_kv)
        else:
            cached, read = paged["cache"].write(*self._cached_states(key, value, batch, index), paged)
            new, num_kv = _lengths(batch, paged)
            pages = (each[..., : states.shape[-1]] for each, states in zip(cached, (key, value), strict=True))
            keys, values = (_in_place(each, read, num_kv, batch.places) for each in pages)
        return list(zip(_divided(query, new), keys, values, strict=True))

    def _through_cache(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, paged: dict[str, Any], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole sequences, in their two widths: the paged cache has rows of one width.

        With block tables, the cache only puts its pages into ``paged``, and the new states come back.
        """
        keys, values = paged["cache"].update(*self._cached_states(key, value, batch, index), paged)
        return keys[..., : key.shape[-1]], values[..., : value.shape[-1]]

    def _cached_states(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, index: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The new states in the width of the cache, and their layer. A layer that attends again is another layer."""
        layer = index + (self._layers * batch.calls_before(index) if self._calls > 1 else 0)
        return widened(key, self._width), widened(value, self._width), layer


def _in_place(
    pages: torch.Tensor, read: torch.Tensor, num_kv: Sequence[int], places: Sequence[int | None]
) -> list[torch.Tensor]:
    """The keys or values of every sequence in the ``pages`` [places, heads, dim] of a layer.

    Those without a place are copied: ``read`` finds them.
    """
    lengths = [length for length, place in zip(num_kv, places, strict=True) if place is None]
    copies = pages.index_select(0, read).transpose(0, 1)[None] if lengths else None
    copied = iter(() if copies is None else _divided(copies, lengths))
    whole = pages.transpose(0, 1)[None]
    return [
        next(copied) if place is None else whole.narrow(2, place, length)
        for length, place in zip(num_kv, places, strict=True)
    ]


def _divided(states: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """``states`` [1, heads, tokens, dim] by the ``lengths`` of their sequences."""
    return (states,) if len(lengths) == 1 else torch.split_with_sizes(states, lengths, 2)


def _lengths(batch: Batch, paged: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(number of new tokens, number of keys) of every sequence; the layer's cache says where each one's keys end."""
    edges: torch.Tensor = paged["cu_seq_lens_k"]
    return batch.shared(edges.data_ptr(), lambda: packed_lengths(batch, edges))
