"""The memory of a model's weights: every storage once, also of tied, shared and quantized tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, or codes, scales and zero points of a quantized one."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)  # torch's protocol of tensors made of others
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in parts(getattr(tensor, name))]


def storages(model: Any) -> dict[int, int]:
    """Address -> bytes of every storage of a model's parameters and buffers."""
    found = {}
    for tensor in _tensors(model):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield from parts(tensor.detach())
