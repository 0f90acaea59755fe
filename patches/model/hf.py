"""Putting the seams into a transformers model, and measuring it. The only file that imports transformers.

Seam A: the rotary module's ``forward`` is replaced on the instance.
Seam B: attention and mask functions are registered under a new name.
Seam C: the ``forward`` of a module that embeds absolute positions is replaced on the instance.
The model's own ``forward`` is replaced likewise, by one that opens and ends the state of each forward.
All are undone on leaving the context, also after an exception. A request never patches anything.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from patches.encoding.recipe import AttentionTemperature
from patches.model.architectures import Seams, architecture_of
from patches.model.encodings import with_keyword
from patches.model.geometry import (
    RotaryModule,
    UnsupportedModel,
    geometry_of,
    refuse_other_frequencies,
    rotary_module,
    text_config,
)
from patches.model.measurement import TOKENS, Measurement, TableFormat, Trial, layout_of, measured
from patches.model.seams import Patched

_names = itertools.count()
_PREFIX = "ropeway_"
"""Prefix of the attention's registered name. With "flash" in it, transformers would look for a kernel."""


def _padding_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor | None:
    """Mask function registered beside the attention: passes the padding mask on, builds nothing."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def _no_mask(batch_size: int, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Mask function of models whose attention we replace: they expect a tensor, and never read it."""
    return torch.empty(0)


def _table_format(rotary: RotaryModule | None) -> TableFormat:
    """Format of the model's own rotary tables."""
    if rotary is None:
        return TableFormat()
    module = copy.deepcopy(rotary.module)  # a length-dependent one rewrites its buffers when it runs
    device = rotary.inv_freq.device
    position = torch.arange(TOKENS, device=device)[None]
    arguments = (position, *rotary.types[:1])
    with torch.no_grad():
        output = module(torch.zeros(1, 1, 1, device=device), *arguments)
        half = module(torch.zeros(1, 1, 1, dtype=torch.bfloat16, device=device), *arguments)
    prefix = f"{rotary.types[0]}_" if rotary.types else ""
    factor = getattr(module, f"{prefix}attention_scaling", 1.0)
    layout = layout_of(output, getattr(module, f"{prefix}inv_freq"), factor)
    return TableFormat(layout, isinstance(half, torch.Tensor) or half[0].dtype == torch.float32)


def _measured(model: PreTrainedModel, attention_name: str) -> Measurement:
    """Find out how the model rotates, by running it.

    Raises:
        UnsupportedModel: when it rotates in a way that the seams cannot carry.
    """
    geometry, rotary = geometry_of(model), rotary_module(model)
    table = _table_format(rotary)
    # Several tokens: the embedding of a padding token is zero in many models, and zero does not turn.
    vocab_size = int(text_config(model).vocab_size)
    tokens = torch.linspace(1, vocab_size - 1, TOKENS, device=model.device).long()[None]

    def run(chosen: torch.Tensor, others: torch.Tensor) -> Trial:
        trial = Trial(chosen, others, rotary, table)
        with ExitStack() as undo, torch.no_grad():
            _put(model, attention_name, rotary, trial, undo)
            model(input_ids=tokens, use_cache=False)
        return trial

    return measured(run, geometry, table)


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[Patched]:
    """Within it, ``model`` takes an encoding per row; leaving restores it bit-exactly.

    ``Patched.encoding`` gives the keyword argument. Gradients flow through every method, except into T5's table, whose
    values are read here. Outside, the argument has no meaning: ``generate`` refuses it, and a forward may ignore it.

    Raises:
        UnsupportedModel: when the model cannot be carried, or wraps another one; it is then left untouched.
        ValueError: when it is patched already.
    """
    _refuse_wrapper(model)
    if str(model.config._attn_implementation).startswith(_PREFIX):
        raise ValueError("the model is patched already: one patch serves every encoding")
    name = f"{_PREFIX}{next(_names)}"
    with ExitStack() as undo:
        temperatures = _take_over_temperatures(model, undo)
        patch = Patched(model, name, _measured(model, name), temperatures)
        if patch.rotary_module is not None:
            refuse_other_frequencies(patch.rotary_module, patch.slots[0])
        _put(model, name, patch.rotary_module, patch, undo)
        if patch.embedding is not None:
            _replace_forward(patch.embedding.module, patch.embed, undo)
        forward = wraps(model.forward)(partial(patch.run, model.forward))
        forward.__signature__ = with_keyword(model.forward)  # type: ignore[attr-defined]
        _replace_forward(model, forward, undo)
        yield patch


def _refuse_wrapper(model: object) -> None:
    """``generate`` of a wrapper, such as peft's, runs the model inside."""
    if not isinstance(model, PreTrainedModel):
        inside = "its get_base_model()" if hasattr(model, "get_base_model") else "the transformers model inside"
        raise UnsupportedModel(f"{type(model).__name__} is no PreTrainedModel: patch {inside}")


def _put(
    model: PreTrainedModel, attention_name: str, rotary: RotaryModule | None, seams: Seams, undo: ExitStack
) -> None:
    """Put seams A and B into the model, until ``undo`` closes."""
    architecture, original = architecture_of(model), model.config._attn_implementation
    dispatches = architecture is None or architecture.forward is None
    mask = _padding_mask if dispatches else _no_mask
    for interface, function in ((AttentionInterface, seams.attention), (AttentionMaskInterface, mask)):
        interface.register(attention_name, function)
        undo.callback(interface._global_mapping.pop, attention_name, None)
    if rotary is not None:
        _replace_forward(rotary.module, seams.rotary, undo)
    if architecture is None or architecture.forward is None:
        undo.callback(model.set_attn_implementation, original)
        model.set_attn_implementation(attention_name)
        return
    model.config._attn_implementation = attention_name
    undo.callback(setattr, model.config, "_attn_implementation", original)
    for module in model.modules():
        if type(module).__name__ in architecture.attention:
            _replace_forward(module, partial(architecture.forward, seams, module), undo)


def _take_over_temperatures(model: Any, undo: ExitStack) -> dict[int, AttentionTemperature]:
    """Switch off the temperatures that layers compute by counting tokens; returns them by layer, as functions of
    positions."""
    architecture = architecture_of(model)
    temperatures: dict[int, AttentionTemperature] = {}
    if architecture is None:
        return temperatures
    for module in model.modules():
        own = architecture.temperature(module)
        if own is not None:
            switch, temperature = own
            undo.callback(setattr, module, switch, getattr(module, switch))
            setattr(module, switch, False)
            temperatures[module.layer_idx] = temperature
    return temperatures


def _replace_forward(module: torch.nn.Module, forward: Any, undo: ExitStack) -> None:
    """Replace ``forward`` on the instance; a forward that a library put there comes back."""
    hooked = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if hooked is not None:
            module.forward = hooked

    undo.callback(restore)
    module.forward = forward
