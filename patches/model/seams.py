"""A patched model in a forward: the seams that ``patches.model.hf`` puts into it.

Seam A, the rotary module, reads slots from the positions. Seam B, the attention, goes through the batch segment by
segment. Seam C, the embedding of absolute positions, reads slots too. All read the positions from the ``Forward`` that
the model's replaced ``forward`` opens, since not every architecture hands them on.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from patches.attention import fused
from patches.attention.layer import Layer, bias_of, bias_of_blocks, index_of
from patches.attention.log_sum_exp import widened
from patches.attention.observation import Observed, Observer
from patches.attention.paged.batch import PagedBatch
from patches.batch.segments import Batch, Segment, packed_lengths, padded_keys
from patches.batch.slots import MAX_SLOTS, decode
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.recipe import AttentionTemperature, Recipe, ResolvedRecipe
from patches.model.absolute import AbsoluteEmbedding, embeddings
from patches.model.architectures import MaskKind, architecture_of
from patches.model.arguments import inputs_of, logits_by_index, tokens_of
from patches.model.continuation import continues, returns_cache
from patches.model.encodings import KEYWORD, Encodings
from patches.model.eviction import evict
from patches.model.forward import Forwards
from patches.model.geometry import chunked_layers, text_config
from patches.model.measurement import Measurement
from patches.model.ranks import Ranks, heads_of_rank
from patches.model.rotary_tables import plain_positions, planes_of

PLAIN = ResolvedRecipe(Recipe(None), (), 1.0, 0.0, None)
"""The recipe of layers with another rotary type: their keys are rotated, the rest is ordinary attention."""


class Patched(Encodings):
    """A model whose rows choose their encoding.

    ``encoding`` gives the keyword argument that chooses it, for ``generate``, ``forward`` and trainers. A server works
    one level below: ``slots`` interns encodings, and ``patches.encode`` puts the slot of a token into its
    ``position_ids``. Slot 0 is the checkpoint's own encoding, which a forward without either has.
    """

    def __init__(
        self,
        model: Any,
        attention_name: str,
        measurement: Measurement,
        temperatures: Mapping[int, AttentionTemperature],
    ) -> None:
        """``temperatures`` replace those that layers would compute by counting tokens."""
        num_layers = int(text_config(model).num_hidden_layers)
        heads, geometry = heads_of_rank(model, measurement.geometry.num_attention_heads), measurement.geometry
        if heads is not None:  # encodings are those of the whole model
            geometry = replace(geometry, num_attention_heads=int(text_config(model).num_attention_heads))
        layers: dict[str, int] = dict(Counter(map(str, measurement.roles.values()))) or {"slots": num_layers}
        super().__init__(geometry, layers, model.device)
        self.ranks = Ranks()
        self._of_rank = None if heads is None else lru_cache(2 * MAX_SLOTS)(lambda resolved: resolved.of_heads(heads))
        self.model = model  # a PreTrainedModel, whose library is imported in hf.py only
        self.attention_name = attention_name
        self.roles, self.cached, self.windowed = measurement.roles, measurement.cached, measurement.windowed
        self.rotary_tables = measurement.rotary_tables
        architecture = architecture_of(model)
        embeds = None if architecture is None else architecture.positions
        self.embedding: AbsoluteEmbedding | None = None if embeds is None else embeds(model)
        self.table_format, self._temperatures = measurement.table, temperatures
        self._mask, self._chooses_keys = measurement.mask, measurement.chooses_keys
        self._compressed, self._elsewhere = measurement.compressed, measurement.elsewhere
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._shares_keys = bool(getattr(text_config(model), "num_kv_shared_layers", 0))
        self._layers, self._chunks = num_layers, chunked_layers(text_config(model))
        self._forwards = Forwards()

    @property
    def smallest_window(self) -> int | None:
        """Tokens of the smallest window or chunk in which a layer of the model attends; None without any."""
        return min([*self.windowed.values(), *self._chunks.values()], default=None)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own ``forward`` with plain positions; its state is known to the seams until it returns.

        Raises:
            RuntimeError: inside another forward of this model on the same thread, or with gradient checkpointing.
            ValueError: when the keyword argument of ``encoding`` does not fit the rows or their length.
        """
        if self._forwards.running is not None:
            raise RuntimeError("forwards of a patched model do not nest: one already runs on this thread")
        if self.model.training and getattr(self.model, "is_activation_checkpointing", False):
            raise RuntimeError("gradient checkpointing runs layers again outside of a forward: switch it off")
        chosen = kwargs.pop(KEYWORD, None)
        position_ids, padding_mask = inputs_of(args, kwargs)
        with self.encoded(position_ids, chosen, len(tokens_of(args, kwargs))) as encoded:
            if "position_ids" in kwargs:
                # Inside the model nothing needs to know of slots: some layers compute with positions themselves.
                kwargs["position_ids"] = decode(encoded)[0]
                if not self._takes_positions:
                    del kwargs["position_ids"]
            if self._shares_keys:
                kwargs |= logits_by_index(kwargs, encoded)
            with self._forwards.opened(encoded, padding_mask):
                return forward(*args, **kwargs)

    @cached_property
    def continues(self) -> bool:
        """True if a prompt may be read in chunks; ``continuation`` explains it. Measured outside of a forward."""
        with self._forwards.carrying_nothing():
            return continues(self.model, int(text_config(self.model).vocab_size))

    @cached_property
    def returns_cache(self) -> bool:
        """False for a model that has to read a sequence from its start in each forward. Measured as ``continues``."""
        with self._forwards.carrying_nothing():
            return returns_cache(self.model)

    def packed(self, batch: Batch, paged: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Within it, each forward on this thread is of one packed row; ``Forward`` explains ``paged``."""
        return self.carrying(packed=batch, paged=paged)

    def observing(self, observer: Observer) -> AbstractContextManager[None]:
        """Within it, ``observer`` sees every attention of this model on this thread before it is computed.

        Raises:
            ValueError: for a model whose keys cover several tokens: such keys have no position to observe.
        """
        if self.geometry.compresses_keys:
            raise ValueError("the attention of this model is not observed: some of its keys cover several tokens")
        return self.carrying(observer=observer)

    @property
    def carried(self) -> Mapping[str, Any]:
        """Fields of ``Forward`` that the next forward on this thread has beside its positions."""
        return self._forwards.carried

    def carrying(self, **carried: Any) -> AbstractContextManager[None]:
        """Within it, each forward on this thread has these fields of ``Forward``.

        Raises:
            RuntimeError: within another one, or in a forward.
        """
        return self._forwards.carrying(**carried)

    def rotary(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        layer_type: str | None = None,
        *,
        module: torch.nn.Module | None = None,
    ) -> Any:
        """Seam A: cos and sin of each token by the schedule of its slot, in the format of the model's own ``module``.

        Tables that requests do not choose keep their own frequencies.
        """
        position, slot = decode(self._forwards.current.position_ids)
        if module is not None and not self.rotary_tables.is_chosen(module, layer_type):
            arguments = () if layer_type is None else (layer_type,)
            return type(module).forward(module, x, position, *arguments)
        elsewhere = position_ids is not None and (
            module in self._elsewhere or position_ids.shape[-1] != position.shape[-1]
        )
        if position_ids is not None and elsewhere:  # cached tokens too, or keys that cover several
            if self._forwards.current.packed is not None:
                raise ValueError("position_ids: a layer rotates cached keys anew, which a packed row does not carry")
            position, slot = plain_positions(position_ids), slot[:, -1:]
        if position_ids is not None and len(position) == 1:
            position = position.expand(position_ids.shape[-2], -1)
        position, inv_freq, factor = self.slots.at_write(position, slot)
        return self.table_format.table(position, inv_freq, factor, x.dtype, planes_of(position_ids))

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
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: output [rows, tokens, heads, value dim], segment by segment.

        ``attention_mask`` is the padding mask [rows, seen tokens] or None, and in layers that choose keys
        [rows, heads or 1, tokens, keys]. ``indices`` [rows, tokens, chosen] are keys that a layer chose, and
        ``block_indices`` [rows, groups of heads, tokens, chosen] are blocks of keys.
        ``position_bias`` [rows, heads, tokens, keys] and ``sinks`` [rows, heads, tokens, 1] depend on the tokens.
        A packed row's batch and paged cache come from ``packed``: not every architecture hands unknown arguments on to
        its attention.

        Raises:
            ValueError: for another mask, or for a dropout of attention weights in training.
        """
        if dropout and module.training:
            raise ValueError(f"attention dropout {dropout:g} does not apply here: load the model with 0 to train it")
        forward = self._forwards.current
        bias = bias_of(attention_mask, indices, query, key.shape[2])
        if block_indices is not None:
            size: int = module.indexer.block_size  # type: ignore[assignment, union-attr]
            bias = bias_of_blocks(block_indices, size, query, key.shape[2])
        if position_bias is not None and forward.packed is not None:
            raise ValueError("position_bias: a packed row does not carry learned logits of distances")
        if bias is not None and (forward.packed is not None or not self._chooses_keys):
            raise ValueError("attention_mask must be a padding mask [rows, tokens]: bands decide the rest")
        index = index_of(module)
        if self.geometry.latent and self.roles.get(index) != "own":
            scaling = query.shape[-1] ** -0.5  # the recipe's temperature has the part that a scaling adds
        mask = self._layer_mask(index, sliding_window)
        nothing, own = (s_aux if sinks is None else sinks), self._temperatures.get(index)
        layer = Layer(scaling, mask, softcap, nothing, module, own, bias, position_bias)
        if forward.packed is None:
            padding = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
            batch = forward.padded(query.shape[0], padding)
            return self._attend_padded(query, key, value, batch, layer, index), None
        paged = dict(forward.paged)  # the cache writes what belongs to this layer into it
        if "cache" in paged:
            key, value = self._through_cache(key, value, forward.packed, paged, index)
        if isinstance(forward.packed, PagedBatch):
            pages = paged["k_cache"], paged["v_cache"]
            return self._attend_paged(query, (key, value), pages, forward.packed, layer, index), None
        return self._attend_packed(query, key, value, forward.packed, paged["cu_seq_lens_k"], layer, index), None

    def mask_kind(self, *, insists: bool) -> MaskKind | None:
        """The whole mask that a layer needs to choose keys, or to add keys to those of the tokens."""
        return self._mask if insists or self._mask == "numbers" else None

    def built(self, mask: torch.Tensor) -> torch.Tensor:
        """The whole mask as it is."""
        return mask

    def _layer_mask(self, index: int, sliding_window: int | None) -> LayerMask:
        if index in self._compressed:
            return CAUSAL  # the mask has the window
        if index in self._chunks:
            return ChunkRange(self._chunks[index], 0, 1)
        return CAUSAL if sliding_window is None else DistanceRange(0, sliding_window)

    def _recipe(self, slot: int, index: int) -> ResolvedRecipe:
        """The encoding of a slot in one layer."""
        role = self.roles.get(index, "slots")
        if role == "own":
            return PLAIN
        resolved = self.slots[slot] if role == "slots" else self.slots[slot].unrotated
        if self._of_rank is not None:
            resolved = self._of_rank(resolved)
        return resolved.unmasked if index in self._compressed else resolved

    def _attend(
        self,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        segment: Segment,
        batch: Batch,
        layer: Layer,
        index: int,
        num_sinks: int = 0,
    ) -> torch.Tensor:
        """Attention [rows, heads, q, value dim] of one segment's query, key and value."""
        recipe, (query, key, value) = self._recipe(segment.slot, index), states
        if (observer := self._forwards.current.observer) is not None:
            observer(Observed(query, key, recipe, layer, segment.q_start, num_sinks))
        start = segment.q_start
        return fused.attend(query, key, value, recipe, batch, layer, q_start=start, num_sinks=num_sinks)

    def _attend_padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, layer: Layer, index: int
    ) -> torch.Tensor:
        num_kv, first = key.shape[2], batch.segments[0]
        whole = len(batch.segments) == 1 and first.query == slice(0, query.shape[2])
        num_sinks = _num_sinks(self._recipe(first.slot, index), layer, num_kv, first.q_stop)
        if whole and num_sinks is not None:
            attended = self._attend((query, key, value), first, batch, layer, index, num_sinks)
            return attended.transpose(1, 2).contiguous()
        columns = padded_keys(batch, num_kv)
        if index in self._compressed:
            columns = [slice(0, num_kv)] * len(columns)
        if whole and columns[0].start == 0:
            states = query, key[:, :, columns[0]], value[:, :, columns[0]]
            layer = layer.part(slice(None), slice(None), columns[0])
            return self._attend(states, first, batch, layer, index).transpose(1, 2).contiguous()
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        for segment, keys in zip(batch.segments, columns, strict=True):
            rows = segment.rows
            states = query[rows, :, segment.query], key[rows, :, keys], value[rows, :, keys]
            own = layer.part(rows, segment.query, keys)
            output[rows, segment.query] = self._attend(states, segment, batch, own, index).transpose(1, 2)
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
        new, num_kv = batch.shared(("lengths", key_edges.data_ptr()), lambda: packed_lengths(batch, key_edges))
        parts = zip(query.split(new, 2), key.split(num_kv, 2), value.split(num_kv, 2), strict=True)
        ordinary = self._ordinary(batch, layer, index)
        attended = []
        for segment, states, is_ordinary in zip(batch.segments, parts, ordinary, strict=True):
            if is_ordinary:
                attended.append(fused.ordinary_query(*states, layer.scaling))
                continue
            recipe = self._recipe(segment.slot, index)
            num_sinks = _num_sinks(recipe, layer, states[1].shape[2], segment.q_stop) or 0
            attended.append(self._attend(states, segment, batch, layer, index, num_sinks))
        return torch.cat(attended, dim=2).transpose(1, 2).contiguous()

    def _ordinary(self, batch: Batch, layer: Layer, index: int) -> list[bool]:
        """For each segment of a packed row, True if ``fused.ordinary_query`` attends for it.

        Layers of one role and one window share the answer: decoding many sequences asks this most often.
        """
        if self._forwards.current.observer is not None or not layer.is_ordinary:
            return [False] * len(batch.segments)

        def make() -> list[bool]:
            return [
                segment.q_stop - segment.q_start == 1
                and (resolved := self._recipe(segment.slot, index)).is_plain
                and resolved.recipe.attention_temperature is None
                and layer.mask.is_causal_below(segment.q_stop)
                for segment in batch.segments
            ]

        return batch.shared(("ordinary", self.roles.get(index, "slots"), index in self._compressed, layer.mask), make)

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
        role = self.roles.get(index, "slots")
        rows = query[0].transpose(0, 1)
        return batch.attend(rows, key_pages, value_pages, layer, role, lambda slot: self._recipe(slot, index))[None]

    def _through_cache(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, arguments: dict[str, Any], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole sequences, in their two widths: the paged cache has rows of one width.

        To the cache, a layer that attends again is another layer. With block tables, the cache only puts its pages into
        ``arguments``, and the new states come back.
        """
        layer = index + self._layers * batch.calls_before(index)
        rows = (widened(states, self.cached.width) for states in (key, value))
        keys, values = arguments["cache"].update(*rows, layer, arguments)
        return keys[..., : key.shape[-1]], values[..., : value.shape[-1]]

    def embed(self, *_: Any, **__: Any) -> torch.Tensor:
        """Seam C: position embeddings [rows, tokens, width] of this forward, each token's by the recipe of its slot."""
        assert self.embedding is not None
        return embeddings(self.embedding, self._forwards.current.position_ids, self.slots)

    def sink_window(self, resolved: ResolvedRecipe) -> tuple[int, int] | None:
        """(num_sinks, window_size) that any later query can reach under ``resolved``; None: caches need every key."""
        # A layer that attends to everything, chooses keys, or counts the cache's tokens would miss evicted keys.
        alike = set(self.roles.values()) <= {"slots"} and not self._chunks and not self._chooses_keys
        return resolved.recipe.sink_window if alike else None

    def evict(self, cache: Any, slot: int) -> None:
        """Evict the keys that no later query of the sequence in ``cache`` can reach under ``slot``."""
        sink_window = self.sink_window(self.slots[slot])
        if sink_window is not None:
            self.ranks.apply(evict, cache, *sink_window)


def _num_sinks(resolved: ResolvedRecipe, layer: Layer, num_kv: int, q_stop: int) -> int | None:
    """Number of first keys before a gap, where the cache has evicted keys out of reach; None: nothing is evicted, or
    the layer has a window."""
    sink_window = resolved.recipe.sink_window if num_kv < q_stop and layer.mask is CAUSAL else None
    return None if sink_window is None else sink_window[0]
