"""Seam B, the attention of a patched model: segment by segment, each under the recipe of its slot.

transformers calls it by name, with the arguments that every attention function gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from patches.attention.layer import Layer, among_others, bias_of, bias_of_blocks, index_of, is_among_tokens
from patches.attention.observation import Observer
from patches.batch.segments import Batch, padded_keys
from patches.batch.slots import SlotTable
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.recipe import AttentionTemperature
from patches.model.attention.packed_attention import PackedAttention
from patches.model.attention.segment_attention import SegmentAttention, num_sinks_of
from patches.model.forward import Forwards
from patches.model.measuring.geometry import chunked_layers
from patches.model.measuring.measurement import Measurement


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
        self._roles, self._latent = measurement.roles, measurement.geometry.latent
        self._chooses_keys, self._compressed = measurement.chooses_keys, measurement.compressed
        self._windowed = measurement.windowed
        self._forwards = forwards
        self.segments = SegmentAttention(measurement, heads, slots)
        self.shared = {layer: source for layer, source in measurement.shared.items() if self._needs_same(layer, source)}
        layers = int(config.num_hidden_layers)
        self.packed = PackedAttention(layers, self.shared, measurement, self.segments, forwards)

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        *,
        s_aux: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Output [rows, tokens, heads, value dim], by the name that the model's layers call.

        ``attention_mask`` is the padding mask [rows, seen tokens] or None, and in layers that choose keys
        [rows, heads or 1, tokens, keys]. ``s_aux`` [heads] and ``sinks`` [rows, heads, tokens, 1] are those of
        ``Layer``; ``arguments`` are explained at ``_layer``.
        A packed row's batch and paged cache come from the ``Forward``: not every architecture hands unknown arguments
        on to its attention. Of such a row, everything but the states is the same in each step.

        Raises:
            ValueError: for another mask, or for a dropout of attention weights in training.
        """
        if dropout and module.training:
            raise ValueError(f"attention dropout {dropout:g} does not apply here: load the model with 0 to train it")
        if not is_among_tokens(module):
            return among_others(query, key, value, scaling), None
        forward, index = self._forwards.current, index_of(module)
        if self._latent and self._roles.get(index) != "own":
            scaling = query.shape[-1] ** -0.5  # the recipe's temperature has the part that a scaling adds
        layer = self._layer(module, index, query, key.shape[2], attention_mask, scaling, **arguments)
        nothing = s_aux if sinks is None else sinks
        if forward.packed is None:
            padding = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
            batch = forward.padded(query.shape[0], padding)
            layer = layer if nothing is None else replace(layer, sinks=nothing)
            return self._attend_padded(query, key, value, batch, layer, index, forward.observer), None
        if layer.relative_logits is not None:
            raise ValueError("position_bias: a packed row does not carry learned logits of distances")
        if layer.bias is not None:
            raise ValueError("attention_mask must be a padding mask [rows, tokens]: bands decide the rest")
        return forward.call(self.packed.attend, query, key, value, layer, index, nothing), None

    def _layer(
        self,
        module: torch.nn.Module,
        index: int,
        query: torch.Tensor,
        num_kv: int,
        attention_mask: torch.Tensor | None,
        scaling: float,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> Layer:
        """The facts about the layer, without sinks.

        ``indices`` [rows, tokens, chosen] are keys that a layer chose, and ``block_indices`` [rows, groups of heads,
        tokens, chosen] are blocks of keys. ``position_bias`` [rows, heads, tokens, keys] depends on the tokens.

        Raises:
            ValueError: for a mask of a layer that chooses no keys.
        """
        bias = bias_of(attention_mask, indices, query, num_kv)
        if block_indices is not None:
            size: int = module.indexer.block_size  # type: ignore[assignment, union-attr]
            bias = bias_of_blocks(block_indices, size, query, num_kv)
        if bias is not None and not self._chooses_keys:
            raise ValueError("attention_mask must be a padding mask [rows, tokens]: bands decide the rest")
        mask, own = self.layer_mask(index, sliding_window), self.temperatures.get(index)
        return Layer(scaling, mask, softcap, None, module, own, bias, position_bias)

    def _needs_same(self, layer: int, other: int) -> bool:
        """True if both layers need the same keys in a cache, rotated alike."""
        alike = self.layer_mask(layer) == self.layer_mask(other) and self._roles.get(layer) == self._roles.get(other)
        return alike and layer not in self._compressed

    def layer_mask(self, index: int, sliding_window: int | None = None) -> LayerMask:
        """The mask of a layer, whose window a call may name."""
        if index in self._compressed:
            return CAUSAL  # the mask has the window
        if index in self.chunks:
            return ChunkRange(self.chunks[index], 0, 1)
        window = self._windowed.get(index) if sliding_window is None else sliding_window
        return CAUSAL if window is None else DistanceRange(0, window)

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
        recipe = self.segments.recipe(self.segments.role(index), first.slot)
        num_sinks = num_sinks_of(recipe, layer, num_kv, first.q_stop)
        if whole and num_sinks is not None:
            attended = self.segments.attend((query, key, value), first, batch, layer, index, observer, num_sinks)
            return attended.transpose(1, 2).contiguous()
        columns = padded_keys(batch, num_kv)
        if index in self._compressed:
            columns = [slice(0, num_kv)] * len(columns)
        if whole and columns[0].start == 0:
            states = query, key[:, :, columns[0]], value[:, :, columns[0]]
            layer = layer.part(slice(None), slice(None), columns[0])
            return self.segments.attend(states, first, batch, layer, index, observer).transpose(1, 2).contiguous()
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        for segment, keys in zip(batch.segments, columns, strict=True):
            rows = segment.rows
            states = query[rows, :, segment.query], key[rows, :, keys], value[rows, :, keys]
            own = layer.part(rows, segment.query, keys)
            output[rows, segment.query] = self.segments.attend(states, segment, batch, own, index, observer).transpose(
                1, 2
            )
        return output
