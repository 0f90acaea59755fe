"""Putting the seams into a transformers model, and measuring it. The only file that imports transformers.

Seam A: the rotary module's ``forward`` is replaced on the instance.
Seam B: attention and mask functions are registered under a new name.
Seam C: the ``forward`` of a module that embeds absolute positions is replaced on the instance.
The model's own ``forward`` is replaced likewise, by one that opens and ends the state of each forward.
All are undone on leaving the context, also after an exception. A request never patches anything.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from patches.attention.paged.batch import runs_triton
from patches.model.architectures import MaskKind, Seams, architecture_of
from patches.model.encodings import with_keyword
from patches.model.fusion.replacement import fuse
from patches.model.generation import replace_generate
from patches.model.measuring.forwards import (
    BIDIRECTIONAL,
    OtherLogits,
    computes_its_own_encoding,
    evaluating,
    logits_of,
    refuse_bidirectional,
    refuse_other_logits,
    refuse_positions_added_to_tokens,
    refusing,
    relative_difference,
    table_format,
)
from patches.model.measuring.geometry import (
    UnsupportedModel,
    dispatches,
    geometry_of,
    refuse_other_frequencies,
    tables_of,
    text_config,
    unwindowed_layers,
)
from patches.model.measuring.half_precision import rounding_of
from patches.model.measuring.measurement import Measurement, compared_tokens, measured
from patches.model.measuring.rounding import allowed_rounding
from patches.model.measuring.trial import TOKENS, Trial
from patches.model.replacement import replace_forward, take_over_temperatures
from patches.model.rotary_tables import RotaryTable, RotaryTables, TableFormat
from patches.model.seams import Patched
from patches.proposals import UNSCALED
from patches.rope_parameters import CHUNKS

_names = itertools.count()
_patched: WeakSet[PreTrainedModel] = WeakSet()
_lock = threading.Lock()
_PREFIX = "ropeway_"
"""Prefix of the attention's registered name. With "flash" in it, transformers would look for a kernel."""


def _mask(
    seams: Seams,
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **arguments: Any,
) -> torch.Tensor | None:
    """Mask function registered beside the attention: passes the padding mask on, and builds nothing.

    A model that chooses keys by its mask, or adds keys, gets a whole one [rows, 1, q_length, kv_length].
    """
    kind = seams.mask_kind(insists=not allow_is_causal_skip, local=arguments.get("local_size") is not None)
    if kind is not None:
        arguments |= {"attention_mask": attention_mask, "allow_is_causal_skip": False}
        build = eager_mask if kind == "numbers" else sdpa_mask
        whole = build(batch_size, q_length, kv_length, **arguments)
        if whole is None:  # left out only where no token is to be hidden
            raise UnsupportedModel(BIDIRECTIONAL)
        return seams.built(whole, arguments.get("local_size"))
    # Packed rows have no padding, and a CUDA graph of them may read no tensor.
    if attention_mask is None or seams.packs or bool(attention_mask.all()):
        return None
    return attention_mask


def _no_mask(
    batch_size: int, q_length: int, kv_length: int, *, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Mask function of models whose attention we replace: they expect a tensor, and never read it.

    For static caches, ``generate`` calls it before the forward, which reads the padding.
    """
    return torch.empty(0) if attention_mask is None else attention_mask


def _measured(model: PreTrainedModel, attention_name: str) -> Measurement:
    """Find out how the model rotates, by running it.

    Raises:
        UnsupportedModel: when it rotates in a way that the seams cannot carry.
    """
    geometry_of(model)  # says first what needs no forward
    tables = tables_of(model)
    formats: dict[RotaryTable | None, TableFormat] = {None: TableFormat()}
    formats |= {table: table_format(table) for table in tables}
    unwindowed = unwindowed_layers(text_config(model))

    def run(
        frequencies: Mapping[RotaryTable | None, torch.Tensor],
        tokens: int = TOKENS,
        mask: MaskKind | None = None,
        first: int | None = None,
    ) -> Trial:
        trial = Trial(frequencies, tables, formats, tokens, mask, unwindowed)
        with ExitStack() as undo:
            _put(model, attention_name, tables, trial, undo)
            with refusing("its forward fails with another attention"):
                logits_of(model, tokens, first=first)
        return trial

    if not formats.keys() - {None} and architecture_of(model) is None:
        refuse_positions_added_to_tokens(model)
        if "position_ids" in inspect.signature(model.forward).parameters and run({}, first=1).moved(run({}, first=0)):
            raise UnsupportedModel("its layers rotate in a way that we do not know")
    return measured(run, tables, formats, partial(geometry_of, model))


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[Patched]:
    """Within it, ``model`` takes an encoding per row; leaving restores it bit-exactly.

    ``Patched.encoding`` gives the keyword argument. Gradients flow through every method. T5's table and learned factors
    of frequencies (Mistral Large 4) get none: their values are read here. Outside, the argument has no meaning:
    ``generate`` refuses it, and a forward may ignore it.
    Under biases, Intel's processors are faster after ``torch.set_flush_denormal(True)``.
    A thread that calls ``generate`` is to be joined inside: leaving stops the call.

    Raises:
        UnsupportedModel: when the model cannot be carried, or wraps another one; it is then left untouched.
        ValueError: when it is patched already, or shares its configuration with a patched one.
        RuntimeError: on leaving, when ``generate`` ran on another thread. The model is restored.
    """
    _refuse_wrapper(model)
    with _once(model), ExitStack() as undo:
        try:
            patch = _patched_until(undo, model)
        except OtherLogits as error:
            undo.close()
            patch = _patched_until(undo, model, rounding_of(model, error, partial(_patched_until, model=model)))
        calls = replace_generate(model, undo)
        yield patch
    calls.refuse_stopped()


def _patched_until(undo: ExitStack, model: PreTrainedModel, rounding: float | None = None) -> Patched:
    """The patch of ``model`` until ``undo`` closes. Without ``rounding``, the model allows that of its number format.

    Raises:
        UnsupportedModel: when the model cannot be carried.
    """
    name = f"{_PREFIX}{next(_names)}"
    with evaluating(model):
        with refusing("its own forward fails"):
            plain = logits_of(model) if computes_its_own_encoding(model) else None
            if rounding is None:
                rounding = allowed_rounding(model, lambda: logits_of(model), relative_difference)
            if plain is not None:
                refuse_bidirectional(model, plain, rounding)
        measurement = _measured(model, name)
        compared = compared_tokens(text_config(model), measurement)
        if plain is not None and compared > TOKENS:
            plain = logits_of(model, compared)
        temperatures = take_over_temperatures(model, undo)
        try:
            patch = Patched(model, name, measurement, temperatures)
        except ValueError as error:
            raise UnsupportedModel(f"its own encoding does not fit it: {error}") from error
    for table in patch.rotary_tables.chosen[:1]:
        refuse_other_frequencies(table, patch.slots[0])
    _put_all(model, patch, name, undo)
    if plain is not None:
        # transformers passes over declared chunks, so plain RoPE is compared with plain RoPE.
        encoding = patch.encoding(UNSCALED) if getattr(text_config(model), CHUNKS, None) else {}
        with evaluating(model), refusing("its forward fails with another attention"):
            refuse_other_logits(logits_of(model, compared, encoding=encoding), plain, rounding)
    return patch


def _put_all(model: PreTrainedModel, patch: Patched, name: str, undo: ExitStack) -> None:
    """Put every seam into the model, until ``undo`` closes."""
    _put(model, name, patch.rotary_tables, patch, undo)
    if patch.embedding is not None:
        replace_forward(patch.embedding.module, patch.embed, undo)
    if runs_triton(model.device):
        fuse(model, undo, replace_forward)
    forward = wraps(model.forward)(partial(patch.run, model.forward))
    forward.__signature__ = with_keyword(model.forward)  # type: ignore[attr-defined]
    replace_forward(model, forward, undo)


@contextmanager
def _once(model: PreTrainedModel) -> Iterator[None]:
    """Within it, no other thread patches ``model``, nor this one again.

    Raises:
        ValueError: when it is patched already, or shares its configuration with a patched one.
    """
    with _lock:
        if model in _patched:
            raise ValueError("the model is patched already: one patch serves every encoding")
        if str(text_config(model)._attn_implementation).startswith(_PREFIX):
            raise ValueError(
                "its configuration is that of a patched model, or a copy made inside the patch: replace it"
            )
        _patched.add(model)
    try:
        yield
    finally:
        _patched.discard(model)


def _refuse_wrapper(model: object) -> None:
    """``generate`` of a wrapper, such as peft's, runs the model inside."""
    if not isinstance(model, PreTrainedModel):
        inside = "its get_base_model()" if hasattr(model, "get_base_model") else "the transformers model inside"
        raise UnsupportedModel(f"{type(model).__name__} is no PreTrainedModel: patch {inside}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} has an encoder and a decoder; only a decoder alone can be patched"
        )
    if text_config(model).output_attentions:
        raise UnsupportedModel("its configuration has output_attentions, and a patched model returns no weights")
    if model.device.type == "meta":
        if any(hasattr(module, "_hf_hook") for module in model.modules()):  # accelerate's, which brings weights
            raise UnsupportedModel("its weights are offloaded wholly: keep the embedding on a device (device_map)")
        raise UnsupportedModel("its weights are on the device meta: load them first")


def _put(model: PreTrainedModel, attention_name: str, tables: RotaryTables, seams: Seams, undo: ExitStack) -> None:
    """Put seams A and B into the model, until ``undo`` closes."""
    architecture, original = architecture_of(model), model.config._attn_implementation
    by_name = architecture is None or architecture.forward is None
    mask = partial(_mask, seams) if by_name else _no_mask
    for interface, function in ((AttentionInterface, seams.attention), (AttentionMaskInterface, mask)):
        interface.register(attention_name, function)
        undo.callback(interface._global_mapping.pop, attention_name, None)
    for module in tables.modules:
        replace_forward(module, partial(seams.rotary, module=module), undo)
    if architecture is not None and architecture.table is not None:
        for module in _of_classes(model, architecture.rotary):
            replace_forward(module, partial(architecture.table, seams), undo)
    if architecture is None or architecture.forward is None:
        for config in _every_config(model):  # set_attn_implementation refuses what some parts had (VibeVoice's encoder)
            undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
        model.set_attn_implementation(dict.fromkeys(_parts_that_attend(model), attention_name))
        return
    model.config._attn_implementation = attention_name
    undo.callback(setattr, model.config, "_attn_implementation", original)
    for module in _of_classes(model, architecture.attention):
        replace_forward(module, partial(architecture.forward, seams, module), undo)


def _of_classes(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in names]


def _parts_that_attend(model: PreTrainedModel) -> list[str]:
    """The whole and its language model, by transformers' names for them.

    Without the whole where only the language model dispatches its attention by name.
    """
    config, text = model.config, text_config(model)
    return [
        *([""] if dispatches(model) else ()),
        *(name for name in config.sub_configs if getattr(config, name) is text),
    ]


def _every_config(model: PreTrainedModel) -> list[Any]:
    """Configurations of the whole and of all its parts, also of those that no text reaches."""
    found = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in found:
        found += [part for name in config.sub_configs if (part := getattr(config, name)) is not None]
    return found
