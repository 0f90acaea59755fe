"""A patched model in a forward: the seams that ``patches.model.hf`` puts into it.

Seam A, the rotary module, reads slots from the positions; ``rotary_seam`` has it. Seam B, the attention, goes through
the batch segment by segment; ``attention_seam`` has it. Seam C, the embedding of absolute positions, reads slots too.
All read the positions from the ``Forward`` that the model's replaced ``forward`` opens, since not every architecture
hands them on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from patches.attention.observation import Observer
from patches.attention.paged.batch import PagedBatch
from patches.attention.paged.rows import Variant
from patches.batch.segments import Batch
from patches.batch.slots import positions_of
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import UNBOUNDED, LayerMask
from patches.encoding.recipe import AttentionTemperature, ResolvedRecipe
from patches.model.absolute import AbsoluteEmbedding, embeddings
from patches.model.architectures import MaskKind, architecture_of
from patches.model.arguments import by_name, has_several_texts, inputs_of, logits_by_index, parameters_of, tokens_of
from patches.model.attention.attention_seam import AttentionSeam
from patches.model.attention.eviction import evict
from patches.model.checkpointing import Checkpointing
from patches.model.encodings import KEYWORD, Encodings
from patches.model.forward import Forwards
from patches.model.fusion.active import fusing
from patches.model.measuring.continuation import continues, keeps_texts_apart, returns_cache
from patches.model.measuring.geometry import chunked_layers, tempered_layers, text_config
from patches.model.measuring.measurement import Measurement
from patches.model.ranks import Ranks, heads_of_rank
from patches.model.recorded.recording import Recordings
from patches.model.replacement import NotCopied
from patches.model.rotary_seam import RotarySeam
from patches.model.written import ANYWHERE, following, mark, refuse_other_keys


class Patched(Encodings, NotCopied):
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
        config = self._config = text_config(model)
        heads = heads_of_rank(model, measurement.geometry.num_attention_heads)
        geometry = _with_windows(measurement, chunked_layers(config))
        if heads is not None:  # encodings are those of the whole model
            geometry = replace(geometry, num_attention_heads=int(config.num_attention_heads))
        layers: dict[str, int] = dict(Counter(map(str, measurement.roles.values())))
        layers = layers or {"slots": int(config.num_hidden_layers)}
        if tempered := len(temperatures) or tempered_layers(model):
            layers["tempered"] = tempered
        super().__init__(geometry, layers, model.device, getattr(config, "rope_parameters", None))
        self.ranks = Ranks()
        self.model = model  # a PreTrainedModel, whose library is imported in hf.py only
        self.attention_name = attention_name
        self.roles, self.cached, self.windowed = measurement.roles, measurement.cached, measurement.windowed
        self.rotary_tables = measurement.rotary_tables
        architecture = architecture_of(model)
        embeds = None if architecture is None else architecture.positions
        self.embedding: AbsoluteEmbedding | None = None if embeds is None else embeds(model)
        self.table_format = measurement.table
        self._mask, self._chooses_keys = measurement.mask, measurement.chooses_keys
        self._parameters = parameters_of(model.forward, type(model), "forward")
        self._of_packed = self._parameters.keys() - {"cache"}
        self._shares_keys = bool(measurement.shared)
        self._forwards = Forwards()
        self._checkpointing = Checkpointing(self._forwards)
        self._keeps_texts_apart: bool | None = None
        self._measuring = threading.RLock()
        self.rotary = RotarySeam(measurement, self.slots, self._forwards).rotary
        self.attention_seam = AttentionSeam(config, measurement, temperatures, heads, self.slots, self._forwards)
        self.attention = self.attention_seam.attention  # the model calls both without a step in between

    @property
    def smallest_window(self) -> int | None:
        """Tokens of the smallest window or chunk in which a layer of the model attends; None without any."""
        return min([*self.windowed.values(), *self.attention_seam.chunks.values()], default=None)

    @property
    def shared(self) -> Mapping[int, int]:
        """The layers that attend to the keys and values of an earlier one, and that layer."""
        return self.attention_seam.shared

    @property
    def caching_layers(self) -> list[int]:
        """The layers whose keys and values a cache has: those that attend, except for ``shared``."""
        return [layer for layer in self.roles if layer not in self.shared]

    @property
    def local_masks(self) -> dict[int, LayerMask]:
        """The masks of the layers that attend to a window or a chunk only, by index."""
        layers = sorted({*self.windowed, *self.attention_seam.chunks})
        masks = {layer: self.attention_seam.layer_mask(layer) for layer in layers}
        return {layer: mask for layer, mask in masks.items() if mask.most_keys < UNBOUNDED}

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own ``forward`` with plain positions; its state is known to the seams until it returns.

        Raises:
            RuntimeError: inside another forward of this model on the same thread, with another attention, or in an
                export.
            ValueError: for weights of the attention. Also when the keyword argument of ``encoding`` does not fit the
                rows, their length or their cache.
        """
        kwargs = by_name(self._parameters, args, kwargs)
        self._refuse_other_forwards(kwargs)
        packed = self.carried.get("packed")
        chosen = kwargs.pop(KEYWORD, None)
        position_ids, padding_mask = inputs_of(kwargs)
        rows = len(tokens_of(kwargs))
        encoding = partial(self._encoded, position_ids, chosen, rows)
        written: tuple[ResolvedRecipe, ...] = ()  # by row of a cache, none of several texts in a row
        if packed is None and "position_ids" in kwargs and has_several_texts(position_ids, padding_mask):
            self._refuse_several_texts(kwargs.get("cache"))
        elif packed is None:
            written = self.recipes(chosen, rows)
            refuse_other_keys(kwargs.get("cache"), written)
            if padding_mask is None:  # positions of padded rows are those of their columns
                self._refuse_other_positions(kwargs.get("cache"), written, position_ids)
        reopened = partial(self._reopened, encoding, padding_mask) if self._checkpoints else None
        with encoding() as encoded:
            if "position_ids" in kwargs:
                # Inside the model nothing needs to know of slots: some layers compute with positions themselves.
                kwargs["position_ids"] = positions_of(encoded)
                if "position_ids" not in self._parameters:
                    del kwargs["position_ids"]
            if self._shares_keys:
                kwargs |= logits_by_index(kwargs, encoded)
            if packed is None or not packed.is_static:
                self.slots.upload()
            if packed is not None:  # the rest, and the paged cache, is for the attention, which has it from the forward
                kwargs = {name: value for name, value in kwargs.items() if name in self._of_packed}
            recordings = self.carried.get("recordings")
            on_triton = isinstance(packed, PagedBatch) and packed.backend == "triton" and not self.model.training
            with (
                self._forwards.opened(encoded, padding_mask, reopened) as running,
                fusing(on_triton and recordings is None),
                nullcontext() if reopened is None else self._checkpointing.of(self.model),
            ):
                output = forward(**kwargs) if recordings is None else recordings.run(forward, kwargs)
            if packed is None:
                mark(output, written, running.next_position)
            return output

    def _encoded(
        self, position_ids: torch.Tensor, chosen: int | torch.Tensor | None, rows: int
    ) -> AbstractContextManager[torch.Tensor]:
        if chosen is None and not self.packs:  # the host reads no position of a packed row
            return self.encoded_by_length(position_ids)
        return self.encoded(position_ids, chosen, rows)

    def _refuse_other_positions(
        self, cache: Any, encodings: Sequence[ResolvedRecipe], position_ids: torch.Tensor
    ) -> None:
        """Before ``cache`` has more keys."""
        by_distance = self.windowed or self.attention_seam.chunks or not all(each.is_plain for each in encodings)
        follows = following(cache, exactly=bool(by_distance))
        if follows == ANYWHERE:
            return
        first = int(positions_of(position_ids[0, 0]))
        if first not in follows:
            expected = f"{follows.start}" if len(follows) == 1 else f"{follows.start} at least"
            raise ValueError(
                f"position_ids must count up by one behind cached tokens: the next is {expected}. Given, or counted "
                f"from the cache, was {first}"
            )

    @property
    def _checkpoints(self) -> bool:
        return self.model.training and getattr(self.model, "is_activation_checkpointing", False)

    def _refuse_several_texts(self, cache: Any) -> None:
        if cache is not None and cache.get_seq_length():
            raise ValueError("position_ids must count up by one behind cached tokens")
        with self._measuring:
            if self._keeps_texts_apart is None:
                measured, self._keeps_texts_apart = None, True  # for the forward that measures it, on this thread
                try:
                    measured = keeps_texts_apart(self.model, self.num_logits)
                finally:
                    self._keeps_texts_apart = measured
        if self._chooses_keys or not self._keeps_texts_apart:
            raise ValueError("position_ids: layers of this model mix the texts of a row; give each text a row")

    @contextmanager
    def _reopened(
        self, encoding: Callable[[], AbstractContextManager[torch.Tensor]], padding_mask: torch.Tensor | None
    ) -> Iterator[None]:
        """Within it, a layer of a forward runs, or runs again in the backward pass."""
        if self._forwards.running is not None:
            yield
            return
        if self._config._attn_implementation != self.attention_name:
            raise RuntimeError("gradient checkpointing runs layers again: call backward inside of the patch")
        with encoding() as encoded:
            self.slots.upload()
            with self._forwards.opened(encoded, padding_mask):
                yield

    def _refuse_other_forwards(self, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_exporting():
            raise RuntimeError(
                "torch.export: leave the patch, write the encoding into rope_parameters of the model, and export it "
                "(docs/export.md)"
            )
        if self._forwards.running is not None:
            raise RuntimeError("forwards of a patched model do not nest: one already runs on this thread")
        if self._config._attn_implementation != self.attention_name:
            raise RuntimeError("the attention of the patch was replaced: call set_attn_implementation outside of it")
        if kwargs.get("output_attentions", self._config.output_attentions):
            raise ValueError("output_attentions: a patched model returns no weights; leave it out, or do not patch")

    @property
    def num_logits(self) -> int:
        """Tokens that a forward has logits for. Embeddings may have more rows: Moshi has one more."""
        return int(text_config(self.model).vocab_size)

    @cached_property
    def continues(self) -> bool:
        """True if a prompt may be read in chunks; ``continuation`` explains it. Measured outside of a forward."""
        with self._forwards.carrying_nothing():
            return continues(self.model, self.num_logits)

    @cached_property
    def returns_cache(self) -> bool:
        """False for a model that has to read a sequence from its start in each forward. Measured as ``continues``."""
        with self._forwards.carrying_nothing():
            return returns_cache(self.model)

    def packed(
        self, batch: Batch, paged: Mapping[str, Any], recordings: Recordings | None = None
    ) -> AbstractContextManager[None]:
        """Within it, each forward on this thread is of one packed row; ``Forward`` explains ``paged``.

        With ``recordings``, it runs from the list of the first forward with as many tokens, and returns logits only.
        """
        return self.carrying(packed=batch, paged=paged, recordings=recordings)

    def observing(self, observer: Observer) -> AbstractContextManager[None]:
        """Within it, ``observer`` sees every attention of this model on this thread before it is computed.

        Raises:
            ValueError: for a model whose keys cover several tokens: such keys have no position to observe.
        """
        if self.geometry.compresses_keys:
            raise ValueError("the attention of this model is not observed: some of its keys cover several tokens")
        return self.carrying(observer=observer)

    def read_in_place(self) -> None:
        """From now on, the Triton kernel reads long sequences in ordinary caches. The caller knows that it runs."""
        self.attention_seam.segments.reads_in_place = True

    def prepare(self, longest: Mapping[int, int]) -> Hashable:
        """Have the slots of a captured forward in the tensors that it reads, for the tokens in ``longest`` by slot.

        Returns what the operations of the forward depend on beside its inputs: a graph is for one such value.
        """
        self.slots.upload()
        self.attention_seam.packed.rows.write(longest)
        return self.slots.moves, self.slots.adds(longest), self.attention_seam.packed.rows.key(longest)

    def variant(self, slots: Iterable[int]) -> Variant:
        """The variant of paged attention's kernel for ``slots``."""
        return self.attention_seam.packed.rows.variant(slots)

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

    @property
    def packs(self) -> bool:
        """True where forwards on this thread are of packed rows, which have no padding."""
        return "packed" in self.carried

    def mask_kind(self, *, insists: bool, local: bool) -> MaskKind | None:
        """The whole mask that a layer needs to choose keys, or to add keys to those of the tokens."""
        return self._mask if insists or self._mask == "numbers" else None

    def built(self, mask: torch.Tensor, local_size: int | None) -> torch.Tensor:
        """The whole mask as it is."""
        return mask

    def embed(self, *_: Any, **__: Any) -> torch.Tensor:
        """Seam C: position embeddings [rows, tokens, width] of this forward, each token's by the recipe of its slot."""
        embedded: torch.Tensor = self._forwards.current.call(self._embed)
        return embedded

    def _embed(self) -> torch.Tensor:
        assert self.embedding is not None
        forward = self._forwards.current
        used = None if forward.packed is None else forward.packed.slots
        return embeddings(self.embedding, forward.position_ids, self.slots, used)

    def sink_window(self, resolved: ResolvedRecipe) -> tuple[int, int] | None:
        """(num_sinks, window_size) that any later query can reach under ``resolved``; None: caches need every key."""
        # A layer that attends to everything, chooses keys, or counts the cache's tokens would miss evicted keys.
        alike = set(self.roles.values()) <= {"slots"} and not self.attention_seam.chunks and not self._chooses_keys
        return resolved.recipe.sink_window if alike else None

    def evict(self, cache: Any, slot: int) -> None:
        """Evict the keys that no later query of the sequence in ``cache`` can reach under ``slot``."""
        sink_window = self.sink_window(self.slots[slot])
        if sink_window is not None:
            self.ranks.apply(evict, cache, *sink_window)


def _with_windows(measurement: Measurement, chunks: Mapping[int, int]) -> RopeGeometry:
    sizes = {**measurement.windowed, **chunks}
    rotated = [layer for layer, role in measurement.roles.items() if role == "slots"]
    window, widest = (
        max(sizes[layer] for layer in layers) if layers and sizes.keys() >= set(layers) else None
        for layers in (rotated, list(measurement.roles))
    )
    return replace(measurement.geometry, window=window, widest=widest)
