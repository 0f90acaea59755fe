"""The rounding that checks of a model's logits have to allow: by number format, or measured.

Kernels of quantized weights may round activations to fewer bits than the number format of the model has. Those of
bitsandbytes round to bfloat16 on a CPU, and dynamic ones of torchao to int8. The order of a sum decides the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference of logits that is rounding, in their largest one or in their spread. On the tiny models of the
tests rounding makes at most 4e-7, 3e-6, 3e-3 and 2e-2. A wrong mask, bias, rotation or width makes 0.03 and more."""

SCALE, MORE_SCALES = 4 / 3, (5 / 3, 6 / 5, 7 / 5, 8 / 7, 9 / 7, 10 / 7, 11 / 7)
"""Factors on the inputs of layers under which their rounding shows. A power of two would round alike."""

ROUNDED, MOST_ROUNDED = 2.0, 0.05
"""A check allows this many times the measured rounding, at most ``MOST_ROUNDED``: a fault makes a larger difference."""


@torch.no_grad()
def allowed_rounding(
    model: Any,
    forward: Callable[[], torch.Tensor],
    difference: Callable[[torch.Tensor, torch.Tensor], float],
) -> float:
    """``TOLERANCE`` of the number format of ``model``, or more where it has quantized layers that round by more.

    ``difference`` compares the logits of ``forward`` with those of quantized layers that compute at another scale.
    """
    layers = [module for module in model.modules() if _is_quantized(module)]
    tolerance = TOLERANCE[model.dtype]
    if not layers:
        return tolerance
    plain = forward()
    with _scaling(layers, SCALE):
        found = difference(forward(), plain)
    return max(tolerance, min(ROUNDED * found, MOST_ROUNDED))


@torch.no_grad()
def amplified_rounding(
    model: Any,
    forward: Callable[[], torch.Tensor],
    difference: Callable[[torch.Tensor, torch.Tensor], float],
) -> float:
    """``ROUNDED`` times the largest rounding of a plain ``model``, measured under several scales of its layers.

    It has no bound, so a fault may hide in it. Only a comparison in float32 shows that none does.
    """
    layers, plain = [module for module in model.modules() if hasattr(module, "in_features")], forward()
    found = []
    for scale in (SCALE, *MORE_SCALES):
        with _scaling(layers, scale):
            found.append(difference(forward(), plain))
    return ROUNDED * max(found)


@contextmanager
def _scaling(layers: Sequence[nn.Module], scale: float) -> Iterator[None]:
    """Within it, ``layers`` compute at another scale: the same numbers, rounded otherwise."""

    def scaled(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return inputs[0] * scale, *inputs[1:]

    def scaled_back(module: nn.Module, _: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        bias: Any = getattr(module, "bias", None)
        return output / scale if bias is None else (output - bias) / scale + bias

    hooks = [layer.register_forward_pre_hook(scaled) for layer in layers]
    hooks += [layer.register_forward_hook(scaled_back) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_quantized(module: nn.Module) -> bool:
    """True for a linear layer whose weights are not plain numbers, all of them or those of a rank."""
    weight: Any = getattr(module, "weight", None)
    if weight is not None and hasattr(weight, "to_local"):  # the part of a rank
        weight = weight.to_local()
    is_plain = weight is not None and type(weight.data) is torch.Tensor and weight.is_floating_point()
    return hasattr(module, "in_features") and not is_plain
