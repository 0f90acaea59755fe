"""Replacements on the instances of modules, each until a stack closes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from patches.encoding.recipe import AttentionTemperature
from patches.model.architectures import architecture_of


class NotCopied:
    """A part of a patch that the replaced forwards of a model hold. Copies of the model would share it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises:
        TypeError: always. ``copy.deepcopy`` and ``pickle`` of the patched model come here.
        """
        raise TypeError(
            "a patched model is not copied or pickled: do so outside of the patch, or save its state_dict inside"
        )


def take_over_temperatures(model: Any, undo: ExitStack) -> dict[int, AttentionTemperature]:
    """Switch off the temperatures that layers compute by counting tokens; returns them by layer, as functions of
    positions."""
    architecture = architecture_of(model)
    temperatures: dict[int, AttentionTemperature] = {}
    if architecture is None:
        return temperatures
    for module in model.modules():
        own = architecture.temperature(module)
        if own is not None:
            undo.callback(setattr, module, own.attribute, getattr(module, own.attribute))
            setattr(module, own.attribute, own.value)
            temperatures[module.layer_idx] = own.temperature
    return temperatures


def replace_forward(module: torch.nn.Module, forward: Any, undo: ExitStack) -> None:
    """Replace ``forward`` on the instance; a forward that a library put there comes back."""
    replace(module, "forward", forward, undo)


def replace(module: torch.nn.Module, name: str, method: Any, undo: ExitStack) -> None:
    hooked = module.__dict__.get(name)

    def restore() -> None:
        module.__dict__.pop(name, None)
        if hooked is not None:
            setattr(module, name, hooked)

    undo.callback(restore)
    setattr(module, name, method)
