"""Putting the seams into a transformers model, and measuring it. The only file that imports transformers.

Seam A: the rotary module's ``forward`` is replaced on the instance.
Seam B: attention and mask functions are registered under a name of our own.
Seam C: the ``forward`` of a module that embeds absolute positions is replaced on the instance.
All are undone on leaving the context, also after an exception. A request never patches anything.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from patches.model.architectures import Architecture, architecture_of
from patches.model.geometry import RotaryModule, UnsupportedModel, text_config
from patches.model.probe import TOKENS, Probe, format_of, layout_of
from patches.model.seams import Patched

_names = itertools.count()
_PREFIX = "ropeway_"
"""Of the attention's registered name. With "flash" in it, transformers would look for a kernel."""


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


def _measure_table(patch: Patched, rotary: RotaryModule) -> None:
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
    patch.table_format = format_of(output, getattr(probed, f"{prefix}inv_freq"), factor)
    patch.table_keeps_float32 = isinstance(half, torch.Tensor) or half[0].dtype == torch.float32


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
    patch.follow(layout_of(run, pairs))


@contextmanager
def patched(model: PreTrainedModel) -> Iterator[Patched]:
    """Serve one encoding per token from ``model``; restores it bit-exactly on leaving.

    Raises:
        UnsupportedModel: when the model cannot be carried; it is then left untouched.
        ValueError: when it is patched already.
    """
    if str(model.config._attn_implementation).startswith(_PREFIX):
        raise ValueError("the model is patched already: one patch serves every encoding")
    patch = Patched(model, f"{_PREFIX}{next(_names)}")
    if patch.rotary_module is not None:
        _measure_table(patch, patch.rotary_module)
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
        _take_over_temperatures(patch, architecture, undo)
    if architecture is None or architecture.forward is None:
        undo.callback(model.set_attn_implementation, original)
        model.set_attn_implementation(patch.attention_name)
        return
    model.config._attn_implementation = patch.attention_name
    undo.callback(setattr, model.config, "_attn_implementation", original)
    for module in model.modules():
        if type(module).__name__ in architecture.attention:
            _replace_forward(module, partial(architecture.forward, patch, module), undo)


def _take_over_temperatures(patch: Patched, architecture: Architecture, undo: ExitStack) -> None:
    """Switch off the temperatures that layers compute by counting tokens, and apply them by positions."""
    for module in patch.model.modules():
        own = architecture.temperature(module)
        if own is not None:
            switch, temperature = own
            undo.callback(setattr, module, switch, getattr(module, switch))
            setattr(module, switch, False)
            patch.temperatures[module.layer_idx] = temperature


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
