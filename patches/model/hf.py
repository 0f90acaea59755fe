"""The seams in a transformers model. The only file that imports transformers.

Seam A: the rotary module's ``forward`` is replaced on the instance and reads slots from ``position_ids``.
Seam B: attention and mask functions are registered under a name of our own.
Seam C: the ``forward`` of a module that embeds absolute positions is replaced on the instance.
A hook on the model notes the positions of each forward, since not every architecture hands them on. All are
undone on leaving the context, also after an exception. A request never patches anything.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from patches.attention import fused
from patches.attention.layer import Layer
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.method import Method
from patches.encoding.recipe import AttentionTemperature, Recipe, ResolvedRecipe, RopeGeometry
from patches.model.absolute import AbsoluteEmbedding, embeddings
from patches.model.architectures import Architecture, architecture_of
from patches.model.batch import Batch, packed_lengths, padded_batch, padded_keys
from patches.model.eviction import evict
from patches.model.geometry import RotaryModule, UnsupportedModel, geometry_of, rotary_module, text_config
from patches.model.probe import TOKENS, Probe, Role, TableFormat, format_of, formatted, layout_of
from patches.model.slots import SlotTable, decode
from patches.registry import describe, parse, resolve

_names = itertools.count()
_packed: ContextVar[tuple[Batch, Mapping[str, Any]] | None] = ContextVar("packed", default=None)
_PREFIX = "ropeway_"
"""Of the attention's registered name. With "flash" in it, transformers would look for a kernel."""

PLAIN = ResolvedRecipe(Recipe(None), (), 1.0, 0.0, None)
"""Layers with a rotary type of their own: their keys are turned already, the rest is ordinary attention."""


class Patched:
    """A model whose tokens choose their encoding by slot.

    ``slots`` interns encodings; a token's slot goes into its ``position_ids`` with
    ``patches.encode``. Slot 0 is the checkpoint's own encoding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.geometry: RopeGeometry = geometry_of(model)
        self.attention_name = f"{_PREFIX}{next(_names)}"
        self.rotary_module: RotaryModule | None = rotary_module(model)
        self.table_format: TableFormat = "half"
        self.table_keeps_float32 = False
        if self.rotary_module is not None:
            self._measure_table(self.rotary_module)
        architecture = architecture_of(model)
        embeds = None if architecture is None else architecture.positions
        self.embedding: AbsoluteEmbedding | None = None if embeds is None else embeds(model)
        self.roles: dict[int, Role] = {}
        self.cached = (0, 0)
        """(heads, width) of the keys that a cache holds per token and layer; values are padded to that width."""
        self.slots = self._slot_table()
        self.probe: Probe | None = None
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._layers = int(text_config(model).num_hidden_layers)
        self._chunks = _chunked_layers(text_config(model))
        self._temperatures: dict[int, AttentionTemperature] = {}
        self._positions = torch.zeros(1, 1, dtype=torch.long)
        self._padding: torch.Tensor | None = None
        self._batch: Batch | None = None

    def resolve(self, method: Method, length: int) -> ResolvedRecipe:
        """Numbers of ``method`` for this model and a reserved length of ``length`` tokens."""
        return resolve(method, self.geometry, length)

    def describe(self, method: Method, length: int) -> dict[str, Any]:
        """The echo of ``method`` for this model and a reserved length of ``length`` tokens.

        ``layers`` counts those under it, those with a rotary type of their own and those that never rotate.
        """
        layers: dict[str, int] = dict(Counter(self.roles.values())) or {"slots": self._layers}
        return describe(method, self.geometry, length) | {"layers": layers}

    def _slot_table(self) -> SlotTable:
        native = self.resolve(parse({"method": "default"}), self.geometry.original_max_position_embeddings)
        return SlotTable(native, self.geometry.rotary_dim, self.model.device)

    # Seam A

    def rotary(self, x: torch.Tensor, position_ids: torch.Tensor | None = None, layer_type: str | None = None) -> Any:
        """cos and sin of each token by the schedule of its slot, in the format of the model's own module.

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

    def _measure_table(self, rotary: RotaryModule) -> None:
        """Format of the model's own tables, and whether they stay float32 for half-precision inputs."""
        probed = copy.deepcopy(rotary.module)  # a length-dependent one rewrites its buffers when it runs
        device = rotary.inv_freq.device
        position = torch.arange(TOKENS, device=device)[None]
        arguments = (position, *rotary.types[:1])
        with torch.no_grad():
            output = probed(torch.zeros(1, 1, 1, device=device), *arguments)
            half = probed(torch.zeros(1, 1, 1, dtype=torch.bfloat16, device=device), *arguments)
        prefix = f"{rotary.types[0]}_" if rotary.types else ""
        factor = getattr(probed, f"{prefix}attention_scaling", 1.0)
        self.table_format = format_of(output, getattr(probed, f"{prefix}inv_freq"), factor)
        self.table_keeps_float32 = isinstance(half, torch.Tensor) or half[0].dtype == torch.float32

    # Seam B

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
        """Output [rows, tokens, heads, value dim], segment by segment.

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
        layer = Layer(scaling, own, softcap, s_aux, module, self._temperatures.get(index))
        packed = _packed.get()
        if packed is not None:
            batch, paged = packed
            arguments, width = dict(paged), value.shape[-1]  # the cache writes what belongs to this layer into it
            if "cache" in arguments:
                value = F.pad(value, (0, key.shape[-1] - width))  # latent attention: the cache holds one width
                key, value = arguments["cache"].update(key, value, index, arguments)
            value = value[..., :width]
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

    @contextmanager
    def packed(self, batch: Batch, paged: Mapping[str, Any]) -> Iterator[None]:
        """Within it, a forward on this thread is of one packed row. ``paged`` tells where its keys end
        (``cu_seq_lens_k``), and holds the paged ``cache`` that they are in, unless all of them are new."""
        token = _packed.set((batch, paged))
        try:
            yield
        finally:
            _packed.reset(token)

    # Seam C

    def embed(self, *_: Any, **__: Any) -> torch.Tensor:
        """Position embeddings [rows, tokens, width] of the tokens of this forward, each by the recipe of its slot."""
        assert self.embedding is not None
        return embeddings(self.embedding, self._positions, self.slots)

    def take_over_temperatures(self, architecture: Architecture, undo: ExitStack) -> None:
        """Switch off the temperatures that layers compute by counting tokens, and apply them by positions."""
        for module in self.model.modules():
            own = architecture.temperature(module)
            if own is not None:
                switch, temperature = own
                undo.callback(setattr, module, switch, getattr(module, switch))
                setattr(module, switch, False)
                self._temperatures[module.layer_idx] = temperature  # type: ignore[index]

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

    # The hook

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before a forward: note its encoded positions and its padding. Positions not given count real tokens."""
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
        if "position_ids" in kwargs and positions is not None:
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


def _padding_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor | None:
    """Mask function registered beside the attention: passes the padding mask on, builds nothing."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def _no_mask(batch_size: int, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Mask function of models whose attention we replace and which expect a tensor: nobody reads it."""
    return torch.empty(0)


def _measure(patch: Patched) -> None:
    """Find out how the patched model rotates, by running it.

    Raises:
        UnsupportedModel: when it rotates in a way that the seams cannot carry.
    """
    # Several tokens: the embedding of a padding token is zero in many models, and zero does not turn.
    vocab_size = int(text_config(patch.model).vocab_size)
    tokens = torch.linspace(1, vocab_size - 1, TOKENS, device=patch.model.device).long()[None]
    pairs = patch.geometry.rotary_dim // 2

    def run(chosen: torch.Tensor, others: torch.Tensor) -> dict[int, torch.Tensor]:
        patch.probe = Probe(chosen.to(tokens.device), others.to(tokens.device))
        try:
            with torch.no_grad():
                patch.model(input_ids=tokens, use_cache=False)
            patch.cached = patch.probe.cached
            return patch.probe.queries
        finally:
            patch.probe = None

    if not pairs:
        run(torch.empty(0), torch.empty(0))
        return
    layout = layout_of(run, pairs)
    patch.roles = layout.roles
    patch.geometry = replace(patch.geometry, interleaved=layout.interleaved, rotary_offset=layout.offset)
    patch.slots = patch._slot_table()


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[Patched]:
    """Serve one encoding per token from ``model``; restores it bit-exactly on leaving.

    Raises:
        UnsupportedModel: when the model cannot be carried; it is then left untouched.
        ValueError: when it is patched already.
    """
    if str(model.config._attn_implementation).startswith(_PREFIX):
        raise ValueError("the model is patched already: one patch serves every encoding")
    patch = Patched(model)
    with ExitStack() as undo:
        _put_attention(patch, undo)
        if patch.rotary_module is not None:
            _replace_forward(patch.rotary_module.module, patch.rotary, undo)
        if patch.embedding is not None:
            _replace_forward(patch.embedding.module, patch.embed, undo)
        handle = model.register_forward_pre_hook(patch.enter, with_kwargs=True)
        undo.callback(handle.remove)
        _measure(patch)
        yield patch


def _put_attention(patch: Patched, undo: ExitStack) -> None:
    model, architecture = patch.model, architecture_of(patch.model)
    original = model.config._attn_implementation
    dispatches = architecture is None or architecture.forward is None
    mask = _padding_mask if dispatches else _no_mask
    for interface, function in ((AttentionInterface, patch.attention), (AttentionMaskInterface, mask)):
        interface.register(patch.attention_name, function)
        undo.callback(interface._global_mapping.pop, patch.attention_name, None)
    if architecture is not None:
        patch.take_over_temperatures(architecture, undo)
    if architecture is None or architecture.forward is None:
        undo.callback(model.set_attn_implementation, original)
        model.set_attn_implementation(patch.attention_name)
        return
    model.config._attn_implementation = patch.attention_name
    undo.callback(setattr, model.config, "_attn_implementation", original)
    for module in model.modules():
        if type(module).__name__ in architecture.attention:
            _replace_forward(module, partial(architecture.forward, patch, module), undo)


def _replace_forward(module: torch.nn.Module, forward: Any, undo: ExitStack) -> None:
    """Replace ``forward`` on the instance; what a library had hooked there comes back."""
    hooked = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if hooked is not None:
            module.forward = hooked

    undo.callback(restore)
    module.forward = forward


__all__ = ["Patched", "UnsupportedModel", "patched"]
