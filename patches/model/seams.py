"""What a patched model does in a forward: the seams that ``patches.model.hf`` puts into it.

Seam A, the rotary module, reads slots from the positions. Seam B, the attention, goes through the batch segment by
segment. Seam C, the embedding of absolute positions, reads slots too. A hook notes the positions of each forward,
since not every architecture hands them on.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from patches.attention import fused
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import widened
from patches.batch.segments import Batch, packed_lengths, padded_batch, padded_keys
from patches.batch.slots import SlotTable, decode
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.method import Method
from patches.encoding.recipe import AttentionTemperature, Recipe, ResolvedRecipe
from patches.model.absolute import AbsoluteEmbedding, embeddings
from patches.model.architectures import architecture_of
from patches.model.eviction import evict
from patches.model.geometry import RotaryModule, geometry_of, rotary_module, text_config
from patches.model.probe import CachedStates, Layout, Probe, Role, TableFormat, formatted
from patches.parsing import parse
from patches.resolution import confirmed, describe, resolve

_packed: ContextVar[tuple[Batch, Mapping[str, Any]] | None] = ContextVar("packed", default=None)

PLAIN = ResolvedRecipe(Recipe(None), (), 1.0, 0.0, None)
"""Layers with a rotary type of their own: their keys are turned already, the rest is ordinary attention."""


class Patched:
    """A model whose tokens choose their encoding by slot.

    ``slots`` interns encodings; a token's slot goes into its ``position_ids`` with
    ``patches.encode``. Slot 0 is the checkpoint's own encoding.
    """

    def __init__(self, model: Any, attention_name: str) -> None:
        self.model = model  # a PreTrainedModel, whose library is imported in hf.py only
        self.geometry: RopeGeometry = geometry_of(model)
        self.attention_name = attention_name
        self.rotary_module: RotaryModule | None = rotary_module(model)
        self.table_format: TableFormat = "half"
        self.table_keeps_float32 = False
        architecture = architecture_of(model)
        embeds = None if architecture is None else architecture.positions
        self.embedding: AbsoluteEmbedding | None = None if embeds is None else embeds(model)
        self.roles: dict[int, Role] = {}
        self.cached = CachedStates()
        self.slots = self._slot_table()
        self.temperatures: dict[int, AttentionTemperature] = {}
        """Of layers that computed one by counting tokens, and no longer do."""
        self.probe: Probe | None = None
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._layers = int(text_config(model).num_hidden_layers)
        self._chunks = _chunked_layers(text_config(model))
        self._positions = torch.zeros(1, 1, dtype=torch.long)
        self._padding: torch.Tensor | None = None
        self._batch: Batch | None = None

    def resolve(self, method: Method, length: int) -> ResolvedRecipe:
        """Numbers of ``method`` for this model and a reserved length of ``length`` tokens."""
        return resolve(self.confirmed(method, length), self.geometry, length)

    def confirmed(self, method: Method, length: int) -> Method:
        """``method`` without what its request says must follow, once that has been found true here.

        Raises:
            EchoMismatch: naming the first number that differs.
        """
        return confirmed(method, self.geometry, length, self.layers) if method.follows else method

    def describe(self, method: Method, length: int) -> dict[str, Any]:
        """The echo of ``method`` for this model and a reserved length of ``length`` tokens."""
        return describe(method, self.geometry, length, self.layers)

    @property
    def layers(self) -> dict[str, int]:
        """How many layers are under the encoding, have a rotary type of their own, and never rotate."""
        return dict(Counter(self.roles.values())) or {"slots": self._layers}

    def _slot_table(self) -> SlotTable:
        native = self.resolve(parse({"method": "default"}), self.geometry.original_max_position_embeddings)
        return SlotTable(native, self.geometry.rotary_dim, self.model.device)

    def forget_encodings(self) -> None:
        """Empty the table of slots, of which none may be in use."""
        self.slots = self._slot_table()

    def follow(self, layout: Layout) -> None:
        """Take over how the model was measured to rotate."""
        self.roles = layout.roles
        self.geometry = replace(self.geometry, interleaved=layout.interleaved, rotary_offset=layout.offset)
        self.forget_encodings()

    def rotary(self, x: torch.Tensor, position_ids: torch.Tensor | None = None, layer_type: str | None = None) -> Any:
        """Seam A: cos and sin of each token by the schedule of its slot, in the format of the model's own module.

        Layer types that requests do not choose keep their own frequencies.
        """
        position, slot = decode(self._positions)
        rotary = self.rotary_module
        factor: torch.Tensor | float = 1.0
        if self.probe is not None:
            inv_freq = self.probe.inv_freq(layer_type, rotary)
        elif rotary is not None and layer_type not in (None, *rotary.types[:1]):
            return type(rotary.module).forward(rotary.module, x, position, layer_type)
        else:
            inv_freq, factor = self.slots.inv_freq[slot], self.slots.attention_factor[slot]
        table = formatted(position[..., None], inv_freq, factor, self.table_format)
        if isinstance(table, tuple) and not self.table_keeps_float32:
            return tuple(part.to(x.dtype) for part in table)
        return table

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
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: output [rows, tokens, heads, value dim], segment by segment.

        ``attention_mask`` is the padding mask [rows, seen tokens] or None. A packed row's batch and paged
        cache come from ``packed``: not every architecture hands unknown arguments on to its attention.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be a padding mask [rows, tokens]: bands decide the rest")
        if self.probe is not None:
            return self.probe.note(module, query, key, value), None
        index: int = module.layer_idx  # type: ignore[assignment]
        if self.geometry.latent:
            scaling = self.geometry.head_dim**-0.5  # what a scaling adds to it is in the recipe's temperature
        own = self._own_mask(index, sliding_window)
        layer = Layer(scaling, own, softcap, s_aux, module, self.temperatures.get(index))
        packed = _packed.get()
        if packed is not None:
            batch, paged = packed
            arguments = dict(paged)  # the cache writes what belongs to this layer into it
            if "cache" in arguments:
                key, value = self._through_cache(key, value, batch, arguments, index)
            return self._attend_packed(query, key, value, batch, arguments["cu_seq_lens_k"], layer, index), None
        batch = self._current_batch(query.shape[0], attention_mask)
        return self._attend_padded(query, key, value, batch, layer, index), None

    def _own_mask(self, index: int, sliding_window: int | None) -> LayerMask:
        if index in self._chunks:
            return ChunkRange(self._chunks[index], 0, 1)
        return CAUSAL if sliding_window is None else DistanceRange(0, sliding_window)

    def _recipe(self, slot: int, index: int) -> ResolvedRecipe:
        """What an encoding means in one layer."""
        role = self.roles.get(index, "slots")
        if role == "own":
            return PLAIN
        return self.slots[slot] if role == "slots" else self.slots[slot].unrotated

    def _attend_padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, layer: Layer, index: int
    ) -> torch.Tensor:
        held = key.shape[2]
        first = batch.segments[0]
        recipe = self._recipe(first.slot, index)
        whole = len(batch.segments) == 1 and first.query == slice(0, query.shape[2])
        head = _head(recipe, layer, held, first.q_stop)
        if whole and head is not None:
            attended = fused.attend(query, key, value, recipe, batch, layer, q_start=first.q_start, head=head)
            return attended.transpose(1, 2).contiguous()
        columns = padded_keys(batch, held)
        if whole and columns[0].start == 0:
            key, value = key[:, :, columns[0]], value[:, :, columns[0]]
            attended = fused.attend(query, key, value, recipe, batch, layer, q_start=first.q_start)
            return attended.transpose(1, 2).contiguous()
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        for segment, keys in zip(batch.segments, columns, strict=True):
            attended = fused.attend(
                query[segment.rows, :, segment.query],
                key[segment.rows, :, keys],
                value[segment.rows, :, keys],
                self._recipe(segment.slot, index),
                batch,
                layer,
                q_start=segment.q_start,
            )
            output[segment.rows, segment.query] = attended.transpose(1, 2)
        return output

    def _attend_packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        key_edges: torch.Tensor,
        layer: Layer,
        index: int,
    ) -> torch.Tensor:
        """Sequences one after another in a single row; the layer's cache says where each one's keys end."""
        new, held = batch.shared(("lengths", key_edges.data_ptr()), lambda: packed_lengths(batch, key_edges))
        parts = zip(batch.segments, query.split(new, 2), key.split(held, 2), value.split(held, 2), strict=True)
        attended = []
        for segment, q, k, v in parts:
            recipe = self._recipe(segment.slot, index)
            head = _head(recipe, layer, k.shape[2], segment.q_stop) or 0
            attended.append(fused.attend(q, k, v, recipe, batch, layer, q_start=segment.q_start, head=head))
        return torch.cat(attended, dim=2).transpose(1, 2).contiguous()

    def _through_cache(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, arguments: dict[str, Any], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole sequences, in widths of their own: the paged cache has rows of one width. To the
        cache, a layer that attends again is another layer."""
        layer = index + self._layers * batch.calls_before(index)
        rows = (widened(states, self.cached.width) for states in (key, value))
        keys, values = arguments["cache"].update(*rows, layer, arguments)
        return keys[..., : key.shape[-1]], values[..., : value.shape[-1]]

    @contextmanager
    def packed(self, batch: Batch, paged: Mapping[str, Any]) -> Iterator[None]:
        """Within it, a forward on this thread is of one packed row. ``paged`` tells where its keys end
        (``cu_seq_lens_k``), and holds the paged ``cache`` that they are in, unless all of them are new."""
        token = _packed.set((batch, paged))
        try:
            yield
        finally:
            _packed.reset(token)

    def embed(self, *_: Any, **__: Any) -> torch.Tensor:
        """Seam C: position embeddings [rows, tokens, width] of this forward, each token's by the recipe of its slot."""
        assert self.embedding is not None
        return embeddings(self.embedding, self._positions, self.slots)

    def kept(self, resolved: ResolvedRecipe) -> tuple[int, int] | None:
        """(first, last) keys that any later query can reach under ``resolved``; None: caches keep every key."""
        # A layer that attends to everything, or that counts the cache's tokens, would miss what is dropped.
        alike = set(self.roles.values()) <= {"slots"} and not self._chunks
        return resolved.recipe.kept if alike else None

    def evict(self, cache: Any, slot: int) -> None:
        """Free what no later query of the sequence in ``cache`` can reach under ``slot``; most encodings reach all."""
        kept = self.kept(self.slots[slot])
        if kept is not None:
            evict(cache.layers, *kept)

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The hook: note encoded positions and padding before a forward. Positions not given count real tokens."""
        given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next(value for value in given if value is not None)
        positions, past = kwargs.get("position_ids"), kwargs.get("past_key_values")
        mask = kwargs.get("attention_mask")
        self._padding = mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        if positions is None:
            seen = 0 if past is None else past.get_seq_length()
            positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None]
            if self._padding is not None and not bool(self._padding.all()):
                positions = (self._padding.long().cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        self._positions, self._batch = positions, None
        if "position_ids" in kwargs:
            # Inside the model nothing needs to know of slots: some layers compute with positions themselves.
            kwargs = {**kwargs, "position_ids": decode(positions)[0]}
            if not self._takes_positions:
                del kwargs["position_ids"]
        return args, kwargs

    def _current_batch(self, rows: int, padding_mask: torch.Tensor | None) -> Batch:
        """The layers of one forward share one description of their batch."""
        if self._batch is None:
            mask = self._padding if padding_mask is None else padding_mask
            self._batch = padded_batch(rows, self._positions, None if mask is None or bool(mask.all()) else mask)
        return self._batch


def _head(resolved: ResolvedRecipe, layer: Layer, held: int, q_stop: int) -> int | None:
    """How many first keys stayed where keys behind them, which no query reaches, have left the cache; None: all are
    there, or the layer keeps a window of its own."""
    kept = resolved.recipe.kept if held < q_stop and layer.own is CAUSAL else None
    return None if kept is None else kept[0]


def _chunked_layers(config: Any) -> dict[int, int]:
    """Layer -> tokens per chunk, for layers that attend within chunks (Llama 4)."""
    kinds = getattr(config, "layer_types", None) or []
    return {index: int(config.attention_chunk_size) for index, kind in enumerate(kinds) if kind == "chunked_attention"}
