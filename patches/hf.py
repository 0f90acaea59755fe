"""The two seams in a transformers model. The only file that imports transformers.

Seam A: the rotary module's ``forward`` is replaced on the instance and reads slots from
``position_ids``. Seam B: attention and mask functions are registered under a name of our own. Both
are undone on leaving the context, also after an exception. A request never patches anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from patches.attention import fused
from patches.batch import Batch, padded_batch
from patches.geometry import RotarySeam, UnsupportedModel, geometry_of, probe_rotary
from patches.method import Method
from patches.recipe import ResolvedRecipe, RopeGeometry
from patches.registry import describe, parse, resolve
from patches.rotary import rotary_table
from patches.slots import SlotTable, decode

_names = itertools.count()
_packed: ContextVar[tuple[Batch, Mapping[str, Any]] | None] = ContextVar("packed", default=None)
_PREFIX = "ropeway_"
"""Of the attention's registered name. With "flash" in it, transformers would look for a kernel."""


class Patched:
    """A model whose tokens choose their encoding by slot.

    ``slots`` interns encodings; a token's slot goes into its ``position_ids`` with
    ``patches.encode``. Slot 0 is the checkpoint's own encoding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.geometry: RopeGeometry = geometry_of(model)
        self.seam: RotarySeam = probe_rotary(model)
        self.attention_name = f"{_PREFIX}{next(_names)}"
        native = self.resolve(parse({"method": "default"}), self.geometry.original_max_position_embeddings)
        self.slots = SlotTable(native, self.geometry.rotary_dim, model.device)
        self._positions: torch.Tensor | None = None
        self._batch: Batch | None = None

    def resolve(self, method: Method, length: int) -> ResolvedRecipe:
        """Numbers of ``method`` for this model and a reserved length of ``length`` tokens."""
        return resolve(method, self.geometry, length)

    def describe(self, method: Method, length: int) -> dict[str, Any]:
        """The echo of ``method`` for this model and a reserved length of ``length`` tokens."""
        return describe(method, self.geometry, length)

    def rotary(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Seam A: cos and sin [rows, tokens, rotary_dim], each token by the schedule of its slot."""
        self._batch = None  # a forward begins; its position_ids may be the last one's tensor, rewritten
        position, slot = decode(position_ids)
        cos, sin = rotary_table(
            position,
            self.slots.inv_freq[slot],
            self.slots.attention_factor[slot],
            interleaved=self.seam.table_interleaved,
        )
        return (cos, sin) if self.seam.keeps_float32 else (cos.to(x.dtype), sin.to(x.dtype))

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
        position_ids: torch.Tensor | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: output [rows, tokens, heads, head_dim], segment by segment.

        ``attention_mask`` is the padding mask [rows, seen tokens] or None. A packed row's batch and paged
        cache come from ``packed``: not every architecture hands unknown arguments on to its attention.
        """
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError("attention_mask must be a padding mask [rows, tokens]: bands decide the rest")
        packed = _packed.get()
        if packed is not None:
            batch, paged = packed
            kwargs = dict(paged)  # the cache writes what belongs to this layer into it
            if "cache" in kwargs:
                key, value = kwargs["cache"].update(key, value, module.layer_idx, kwargs)
        elif position_ids is not None:
            batch = self._batch_of(query.shape[0], position_ids, attention_mask)
        else:
            raise ValueError("this architecture does not hand position_ids to its attention")
        options: dict[str, Any] = {"scaling": scaling, "window": sliding_window, "softcap": softcap}
        if batch.packed:
            return self._attend_packed(query, key, value, batch, kwargs["cu_seq_lens_k"], options), None
        columns = _padded_keys(batch, key.shape[2])
        first = batch.segments[0]
        if len(batch.segments) == 1 and first.query == slice(0, query.shape[2]) and columns[0].start == 0:
            key, value = key[:, :, columns[0]], value[:, :, columns[0]]
            attended = fused.attend(query, key, value, self.slots[first.slot], batch, q_start=first.q_start, **options)
            return attended.transpose(1, 2).contiguous(), None
        output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        for segment, keys in zip(batch.segments, columns, strict=True):
            attended = fused.attend(
                query[segment.rows, :, segment.query],
                key[segment.rows, :, keys],
                value[segment.rows, :, keys],
                self.slots[segment.slot],
                batch,
                q_start=segment.q_start,
                **options,
            )
            output[segment.rows, segment.query] = attended.transpose(1, 2)
        return output, None

    def _attend_packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        key_edges: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Sequences one after another in a single row; the layer's cache says where each one's keys end."""
        new, held = batch.shared(("lengths", key_edges.data_ptr()), lambda: _packed_lengths(batch, key_edges))
        parts = zip(batch.segments, query.split(new, 2), key.split(held, 2), value.split(held, 2), strict=True)
        attended = [
            fused.attend(q, k, v, self.slots[segment.slot], batch, q_start=segment.q_start, **options)
            for segment, q, k, v in parts
        ]
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

    def _batch_of(self, rows: int, position_ids: torch.Tensor, padding_mask: torch.Tensor | None) -> Batch:
        """The layers of one forward share their ``position_ids`` tensor, hence one batch description."""
        if self._batch is None or self._positions is not position_ids:
            self._batch, self._positions = padded_batch(rows, position_ids, padding_mask), position_ids
        return self._batch


def _padded_keys(batch: Batch, held: int) -> list[slice]:
    """Key columns per segment. A layer may hold fewer columns than were seen (sliding) or more (static)."""
    dropped = max(0, batch.columns - held)
    return [slice(max(0, s.key_column - dropped), s.key_column + s.q_stop - dropped) for s in batch.segments]


def _packed_lengths(batch: Batch, key_edges: torch.Tensor) -> tuple[list[int], list[int]]:
    """(new tokens, keys held) of every sequence of a packed row."""
    edges = key_edges[: len(batch.segments) + 1].tolist()
    return (
        [segment.query.stop - segment.query.start for segment in batch.segments],
        [last - first for first, last in itertools.pairwise(edges)],
    )


def _padding_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor | None:
    """Mask function registered beside the attention: passes the padding mask on, builds nothing."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def _refuse_layers_out_of_reach(patch: Patched) -> None:
    """Run two tokens with NaN for every angle, and see what reaches the attention of each layer.

    Raises:
        UnsupportedModel: when a layer does not rotate, or does not say which positions it is at.
    """
    turning: dict[int, bool] = {}

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = patch.rotary(x, position_ids)
        return cos * float("nan"), sin * float("nan")

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        if isinstance(mask, torch.Tensor) and mask.ndim != 2:
            raise UnsupportedModel("it builds attention masks of its own, which the bands would have to know")
        if kwargs.get("position_ids") is None:
            raise UnsupportedModel("it does not hand position_ids to its attention")
        turning[module.layer_idx] = bool(query.isnan().any())
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    patch.seam.module.forward = rotary
    AttentionInterface.register(patch.attention_name, attention)
    with torch.no_grad():
        patch.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=patch.model.device), use_cache=False)
    still = [layer for layer, turns in turning.items() if not turns]
    if still or not turning:
        raise UnsupportedModel(f"layers {still} do not rotate" if turning else "no layer uses attention by name")


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[Patched]:
    """Serve one encoding per token from ``model``; restores it bit-exactly on leaving.

    Raises:
        UnsupportedModel: when the model cannot be carried; it is then left untouched.
        ValueError: when it is patched already.
    """
    original = model.config._attn_implementation
    if str(original).startswith(_PREFIX):
        raise ValueError("the model is patched already: one patch serves every encoding")
    patch = Patched(model)
    rotary = patch.seam.module
    forward = rotary.__dict__.get("forward")  # there when a library has hooked this instance
    AttentionInterface.register(patch.attention_name, patch.attention)
    AttentionMaskInterface.register(patch.attention_name, _padding_mask)
    try:
        model.set_attn_implementation(patch.attention_name)
        _refuse_layers_out_of_reach(patch)
        AttentionInterface.register(patch.attention_name, patch.attention)
        rotary.forward = patch.rotary
        yield patch
    finally:
        rotary.__dict__.pop("forward", None)
        if forward is not None:
            rotary.forward = forward
        model.set_attn_implementation(original)
        AttentionInterface._global_mapping.pop(patch.attention_name, None)
        AttentionMaskInterface._global_mapping.pop(patch.attention_name, None)
