"""Seam B, the attention of a patched model: segment by segment, each under the recipe of its slot.

transformers calls it by name, with the arguments that every attention function gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from patches.attention import fused
from patches.attention.layer import Layer, bias_of, bias_of_blocks, index_of
from patches.attention.log_sum_exp import widened
from patches.attention.observation import Observed, Observer
from patches.attention.paged.batch import ModelRows, PagedBatch, Role
from patches.attention.paged.tables import Pairs
from patches.attention.single_query import ORDINARY, Reading, read, reading_of
from patches.attention.states import SegmentStates
from patches.batch.segments import Batch, Segment, packed_lengths, padded_keys
from patches.batch.slots import MAX_SLOTS, SlotTable
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.recipe import AttentionTemperature, Recipe, ResolvedRecipe
from patches.model.forward import Forward, Forwards
from patches.model.geometry import chunked_layers
from patches.model.measurement import Measurement

PLAIN = ResolvedRecipe(Recipe(None), (), 1.0, 0.0, None)
"""The recipe of layers with another rotary type: their keys are rotated, the rest is ordinary attention."""


class AttentionSeam:
    """The attention of every layer of one model. A layer decides its mask and its scores, a slot the recipe."""

    def __init__(
        self,
        config: Any,
        measurement: Measurement,
        temperatures: Mapping[int, AttentionTemperature],
        heads: slice | None,
        slots: SlotTable,
        forwards: Forwards,
    ) -> None:
        """``config`` is that of the language model.

        ``temperatures`` replace those that layers would compute by counting tokens. ``heads`` are those of this rank,
        None for all.
        """
        self.temperatures, self.chunks = temperatures, chunked_layers(config)
        self._roles, self._cached, self._latent = measurement.roles, measurement.cached, measurement.geometry.latent
        self._chooses_keys, self._compressed = measurement.chooses_keys, measurement.compressed
        self._layers, self._slots, self._forwards = int(config.num_hidden_layers), slots, forwards
        self._of_rank = None if heads is None else lru_cache(2 * MAX_SLOTS)(lambda resolved: resolved.of_heads(heads))
        geometry = measurement.geometry
        pairs = Pairs(geometry.rotary_dim // 2, geometry.interleaved, geometry.rotary_offset)
        self.rows = ModelRows(self._recipe, pairs)

    def attention(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """As ``_attention``, by the name that the model's layers call."""
        attended: tuple[torch.Tensor, None] = self._forwards.current.call(self._attention, *args, **kwargs)
        return attended

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Output [rows, tokens, heads, value dim].

        ``attention_mask`` is the padding mask [rows, seen tokens] or None, and in layers that choose keys
        [rows, heads or 1, tokens, keys]. ``indices`` [rows, tokens, chosen] are keys that a layer chose, and
        ``block_indices`` [rows, groups of heads, tokens, chosen] are blocks of keys.
        ``position_bias`` [rows, heads, tokens, keys] and ``sinks`` [rows, heads, tokens, 1] depend on the tokens.
        A packed row's batch and paged cache come from the ``Forward``: not every architecture hands unknown arguments
        on to its attention.

        Raises:
            ValueError: for another mask, or for a dropout of attention weights in training.
        """
        if dropout and module.training:
            raise ValueError(f"attention dropout {dropout:g} does not apply here: load the model with 0 to train it")
        forward, index = self._forwards.current, index_of(module)
        bias = bias_of(attention_mask, indices, query, key.shape[2])
        if block_indices is not None:
            size: int = module.indexer.block_size  # type: ignore[assignment, union-attr]
            bias = bias_of_blocks(block_indices, size, query, key.shape[2])
        if position_bias is not None and forward.packed is not None:
            raise ValueError("position_bias: a packed row does not carry learned logits of distances")
        if bias is not None and (forward.packed is not None or not self._chooses_keys):
            raise ValueError("attention_mask must be a padding mask [rows, tokens]: bands decide the rest")
        if self._latent and self._roles.get(index) != "own":
            scaling = query.shape[-1] ** -0.5  # the recipe's temperature has the part that a scaling adds
        mask = self._layer_mask(index, sliding_window)
        nothing, own = (s_aux if sinks is None else sinks), self.temperatures.get(index)
        layer = Layer(scaling, mask, softcap, nothing, module, own, bias, position_bias)
        if forward.packed is None:
            padding = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
            batch = forward.padded(query.shape[0], padding)
            return self._attend_padded(query, key, value, batch, layer, index, forward.observer), None
        return self._attend_row(query, key, value, forward.packed, layer, index, forward), None

    def _attend_row(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        layer: Layer,
        index: int,
        forward: Forward,
    ) -> torch.Tensor:
        """Attention of a packed row [1, tokens, heads, value dim] through its cache, if it has one."""
        paged = dict(forward.paged)  # the cache writes what belongs to this layer into it
        if isinstance(batch, PagedBatch):
            new = self._through_cache(key, value, batch, paged, index)
            pages = paged["k_cache"], paged["v_cache"]
            return self._attend_paged(query, new, pages, batch, layer, index)
        sequences = self._sequences(key, value, batch, paged, index)
        return self._attend_packed(query, sequences, batch, paged, layer, index, forward.observer)

    def _layer_mask(self, index: int, sliding_window: int | None) -> LayerMask:
        if index in self._compressed:
            return CAUSAL  # the mask has the window
        if index in self.chunks:
            return ChunkRange(self.chunks[index], 0, 1)
        return CAUSAL if sliding_window is None else DistanceRange(0, sliding_window)

    def _role(self, index: int) -> Role:
        return self._roles.get(index, "slots"), index in self._compressed

    def _recipe(self, role: Role, slot: int) -> ResolvedRecipe:
        """The encoding of a slot in layers of a role."""
        kind, is_compressed = role
        if kind == "own":
            return PLAIN
        resolved = self._slots[slot] if kind == "slots" else self._slots[slot].unrotated
        if self._of_rank is not None:
            resolved = self._of_rank(resolved)
        return resolved.unmasked if is_compressed else resolved

    def _attend(
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
        recipe, (query, key, value) = self._recipe(self._role(index), segment.slot), states
        if observer is not None:
            observer(Observed(query, key, recipe, layer, segment.q_start, num_sinks))
        start = segment.q_start
        return fused.attend(query, key, value, recipe, batch, layer, q_start=start, num_sinks=num_sinks)

    def _attend_padded(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        layer: Layer,
        index: int,
        observer: Observer | None,
    ) -> torch.Tensor:
        num_kv, first = key.shape[2], batch.segments[0]
        whole = len(batch.segments) == 1 and first.query == slice(0, query.shape[2])
        num_sinks = _num_sinks(self._recipe(self._role(index), first.slot), layer, num_kv, first.q_stop)
        if whole and num_sinks is not None:
            attended = self._attend((query, key, value), first, batch, layer, index, observer, num_sinks)
            return attended.transpose(1, 2).contiguous()
        columns = padded_keys(batch, num_kv)
        if index in self._compressed:
            columns = [slice(0, num_kv)] * len(columns)
        if whole and columns[0].start == 0:
            states = query, key[:, :, columns[0]], value[:, :, columns[0]]
            layer = layer.part(slice(None), slice(None), columns[0])
            return self._attend(states, first, batch, layer, index, observer).transpose(1, 2).contiguous()
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        for segment, keys in zip(batch.segments, columns, strict=True):
            rows = segment.rows
            states = query[rows, :, segment.query], key[rows, :, keys], value[rows, :, keys]
            own = layer.part(rows, segment.query, keys)
            output[rows, segment.query] = self._attend(states, segment, batch, own, index, observer).transpose(1, 2)
        return output

    def _attend_packed(
        self,
        query: torch.Tensor,
        sequences: list[tuple[torch.Tensor, torch.Tensor]],
        batch: Batch,
        paged: dict[str, Any],
        layer: Layer,
        index: int,
        observer: Observer | None,
    ) -> torch.Tensor:
        """Sequences one after another in a single row, each with its keys and values."""
        new, _ = _lengths(batch, paged)
        parts = [(own, *cached) for own, cached in zip(query.split(new, 2), sequences, strict=True)]
        readings: list[Reading | None] = [None] * len(parts)
        if observer is None and layer.is_ordinary:
            kind = ("readings", self._role(index), layer.mask, paged["cu_seq_lens_k"].data_ptr())
            readings = batch.shared(kind, lambda: self._readings(parts, batch, layer, index))
        attended = []
        for segment, states, reading in zip(batch.segments, parts, readings, strict=True):
            if reading is not None:
                attended.append(read(*states, layer.scaling, reading))
                continue
            recipe = self._recipe(self._role(index), segment.slot)
            num_sinks = _num_sinks(recipe, layer, states[1].shape[2], segment.q_stop) or 0
            attended.append(self._attend(states, segment, batch, layer, index, observer, num_sinks))
        return torch.cat(attended, dim=2).transpose(1, 2).contiguous()

    def _readings(
        self,
        parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        batch: Batch,
        layer: Layer,
        index: int,
    ) -> list[Reading | None]:
        """The reading of each segment with a single query, None for others.

        It is the same in layers of one role and window. Decoding many sequences asks this most often.
        """
        readings: list[Reading | None] = []
        for segment, states in zip(batch.segments, parts, strict=True):
            recipe, start = self._recipe(self._role(index), segment.slot), segment.q_start
            if states[0].shape[2] > 1 or recipe.recipe.relative is not None:
                readings.append(None)
            elif recipe.is_plain and not recipe.recipe.attention_temperature and layer.mask.is_causal_below(start + 1):
                readings.append(ORDINARY)
            else:
                num_sinks = _num_sinks(recipe, layer, states[1].shape[2], segment.q_stop) or 0
                readings.append(reading_of(SegmentStates(*states, recipe, batch, layer, start, num_sinks)))
        return readings

    def _attend_paged(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: tuple[torch.Tensor, torch.Tensor],
        batch: PagedBatch,
        layer: Layer,
        index: int,
    ) -> torch.Tensor:
        """As ``_attend_packed``, from the pages themselves once they have the ``new`` keys and values."""
        key_pages, value_pages = (each[..., : states.shape[-1]] for each, states in zip(pages, new, strict=True))
        for states, target in zip(new, (key_pages, value_pages), strict=True):
            batch.step.write(states[0].transpose(0, 1), target)
        rows = query[0].transpose(0, 1)
        return batch.attend(rows, key_pages, value_pages, layer, self._role(index), self.rows)[None]

    def _sequences(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, arguments: dict[str, Any], index: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every sequence of a packed row, with those in its cache, if it has one."""
        if batch.places is None:
            if "cache" in arguments:
                key, value = self._through_cache(key, value, batch, arguments, index)
            _, num_kv = _lengths(batch, arguments)
            return list(zip(key.split(num_kv, 2), value.split(num_kv, 2), strict=True))
        found = arguments["cache"].write(*self._cached_states(key, value, batch, index), arguments)
        whole, copies = ((keys[..., : key.shape[-1]], values[..., : value.shape[-1]]) for keys, values in found)
        _, num_kv = _lengths(batch, arguments)
        lengths = [length for length, place in zip(num_kv, batch.places, strict=True) if place is None]
        copied = iter(zip(*(states.split(lengths, 2) for states in copies), strict=True) if lengths else ())
        return [
            next(copied) if place is None else (whole[0].narrow(2, place, length), whole[1].narrow(2, place, length))
            for length, place in zip(num_kv, batch.places, strict=True)
        ]

    def _through_cache(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, arguments: dict[str, Any], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole sequences, in their two widths: the paged cache has rows of one width.

        With block tables, the cache only puts its pages into ``arguments``, and the new states come back.
        """
        keys, values = arguments["cache"].update(*self._cached_states(key, value, batch, index), arguments)
        return keys[..., : key.shape[-1]], values[..., : value.shape[-1]]

    def _cached_states(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, index: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The new states in the width of the cache, and their layer. A layer that attends again is another layer."""
        layer = index + self._layers * batch.calls_before(index)
        return widened(key, self._cached.width), widened(value, self._cached.width), layer


def _lengths(batch: Batch, arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
    """(number of new tokens, number of keys) of every sequence; the layer's cache says where each one's keys end."""
    edges: torch.Tensor = arguments["cu_seq_lens_k"]
    return batch.shared(("lengths", edges.data_ptr()), lambda: packed_lengths(batch, edges))


def _num_sinks(resolved: ResolvedRecipe, layer: Layer, num_kv: int, q_stop: int) -> int | None:
    """Number of first keys before a gap, where the cache has evicted keys out of reach; None: nothing is evicted, or
    the layer has a window."""
    sink_window = resolved.recipe.sink_window if num_kv < q_stop and layer.mask is CAUSAL else None
    return None if sink_window is None else sink_window[0]
