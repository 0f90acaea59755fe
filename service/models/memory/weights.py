"""The memory of a model's weights: each place once, also of tied, shared and quantized tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from service.models.linear.packing import PackedWeight


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor consists of: itself, or codes, scales and zero points of a quantized one."""
    local: Any = getattr(tensor, "to_local", None)  # a rank's part of a divided tensor
    if local is not None:
        return parts(local())
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)  # torch's protocol of tensors made of others
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in parts(getattr(tensor, name))]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A packed weight by rows, or all of a tensor that the ranks of a tensor-parallel group have in parts.

    Every rank has to ask for it.
    """
    if isinstance(tensor, PackedWeight):
        return tensor.plain()
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def places(model: Any) -> dict[int, int]:
    """Address -> bytes of a model's parameters and buffers. Several may lie in one storage."""
    return {tensor.data_ptr(): min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _tensors(model)}


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield from parts(tensor.detach())
