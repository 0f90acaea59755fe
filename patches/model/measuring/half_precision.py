"""Models in half precision whose layers amplify rounding, which are compared with their plain forward in float32.

A choice amplifies it, of keys by an indexer or of experts. With random weights, logits of a plain model then differ
from its own in float32 by 0.9 of the largest. Two computations that differ in a last bit alone differ as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from patches.model.measuring.forwards import OtherLogits, evaluating, logits_of, relative_difference
from patches.model.measuring.geometry import UnsupportedModel, tables_of
from patches.model.measuring.rounding import amplified_rounding

HALF = frozenset({torch.float16, torch.bfloat16})


def rounding_of(model: Any, error: OtherLogits, check: Callable[[ExitStack], object]) -> float:
    """The rounding of a model in half precision whose patched logits differ by no more, and are equal in float32.

    ``check`` patches the model until a stack closes, and compares. It runs only where the model's own rounding is as
    large as the difference. A fault of kernels in half precision is larger in other models.

    Raises:
        UnsupportedModel: ``error`` for all others, or the reason why no comparison in float32 is possible.
    """
    if model.dtype not in HALF:
        raise error
    with evaluating(model):
        rounding = amplified_rounding(model, lambda: logits_of(model, error.tokens), relative_difference)
    if not error.difference <= rounding:
        raise error
    try:
        with in_float32(model), ExitStack() as undo:
            check(undo)
    except (UnsupportedModel, torch.OutOfMemoryError) as other:
        if not isinstance(other, torch.OutOfMemoryError) and not isinstance(other.__cause__, torch.OutOfMemoryError):
            raise error from other
        lacks = "Rounding may be the reason, but the memory does not suffice for a comparison in float32"
        raise UnsupportedModel(f"{error}. {lacks}") from other
    return rounding


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within it, parameters and buffers in half precision are float32 ones. Then they are the same memory as before.

    Frequencies of rotary modules remain, since they are compared with the configuration as rounded as they are.
    """
    rotary = {id(buffer) for module in tables_of(model).modules for buffer in module.buffers()}
    every = (*model.parameters(), *model.buffers())
    tensors = [each for each in every if each.dtype in HALF and id(each) not in rotary]
    before = [each.data for each in tensors]
    try:
        for each in tensors:
            each.data = each.data.float()
        yield
    finally:
        for each, data in zip(tensors, before, strict=True):
            each.data = data
