"""Weights of linear layers in the layout of oneDNN's matrix products, which a CPU otherwise makes anew in every call.

oneDNN: https://uxlfoundation.github.io/oneDNN/dev_guide_matmul.html, section "memory formats". The compiler
of torch itself freezes weights by the same two operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from service.models.grouping import FEW, GroupedLinear, by_groups, has_groups, plain
from service.models.huge_pages import advise
from service.models.products import fastest

ROWS = 16
"""Rows that the layout is made for. Layouts made for 8 to 512 rows take equal times, one for a single row more."""


class NotPacked(ValueError):
    """The model's weights cannot be packed."""


class PackedLinear(nn.Linear):
    """A linear layer that computes with a second, packed copy of its weight. Its parameters are those of ``linear``.

    Inference only: the operator has no gradient, and a changed ``weight`` has no effect.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.few: Callable[[Any, torch.Tensor], torch.Tensor] = by_packed
        """The product of up to ``FEW`` rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features] in the dtype of the weight."""
        rows = input.numel() // self.in_features
        return self.few(self, input) if 0 < rows <= FEW else by_packed(self, input)


def by_packed(linear: PackedLinear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features], the layer's output by its packed weight."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, linear.packed, linear.bias, "none", [], "")
    return output


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model on the CPU.

    Raises:
        NotPacked: for another device, for a dtype without products of this processor, without a plain linear layer, or
            without oneDNN.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        raise NotPacked("this torch has no oneDNN")
    dtypes = _dtypes()
    linears = {module: None for module in model.modules() if type(module) is nn.Linear}
    if not linears:
        raise NotPacked("it has no plain linear layer")
    for linear in linears:
        if linear.weight.device.type != "cpu" or linear.weight.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise NotPacked(f"this CPU packs {names}, not {linear.weight.dtype} on {linear.weight.device}")
    packed = {linear: PackedLinear(linear).train(linear.training) for linear in linears}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in packed:
                setattr(module, name, packed[child])
    copies = [linear.packed for linear in packed.values()]
    advise((torch.ops.mkldnn.data_ptr(copy), torch.ops.mkldnn._nbytes(copy)) for copy in copies)
    with_groups = [linear for linear in packed.values() if has_groups(linear)]
    few = fastest(with_groups, 1, by_packed, by_groups, plain) if with_groups else by_packed
    for linear in with_groups:
        linear.few = few


def _dtypes() -> list[torch.dtype]:
    """Number formats that oneDNN multiplies on this processor."""
    half = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return [torch.float32, *(dtype for dtype, is_supported in half.items() if is_supported())]


def packed_bytes(model: Any) -> int:
    """Bytes of the packed copies."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, PackedLinear))


def products_of(model: Any) -> list[str]:
    """Names of the products that layers of the model compute with instead of plain ones."""
    names = {"grouped" for module in model.modules() if isinstance(module, GroupedLinear)}
    few = {module.few.__name__ for module in model.modules() if isinstance(module, PackedLinear)}
    return sorted(names | few | ({"packed"} if few else set()))
