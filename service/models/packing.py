"""Weights of linear layers in the layout of a library's matrix products, which a CPU otherwise makes in every call.

oneDNN: https://uxlfoundation.github.io/oneDNN/dev_guide_matmul.html, section "memory formats". MKL: its reference of
``cblas_?gemm_pack``. The compiler of torch itself freezes weights by the same operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from service.models.grouping import FEW, GroupedLinear, by_groups, has_groups, plain
from service.models.huge_pages import advise
from service.models.products import fastest, some

ROWS = 16
"""Rows for which both layouts are timed, and for which oneDNN's is made. Made for 8 to 512 rows, it is as fast, and
slower for a single one."""
ROWS_OF_MKL = 64
"""Rows for which MKL's layout is made. Made for 16 rows, it is slower for more, and for 512, on several threads."""


Product = Callable[[Any, torch.Tensor], torch.Tensor]


class NotPacked(ValueError):
    """The model's weights cannot be packed."""


class PackedLinear(nn.Linear):
    """A linear layer that computes with a second, packed copy of its weight. Its parameters are those of ``linear``.

    Inference only: the operator has no gradient, and a changed ``weight`` has no effect.
    """

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = LAYOUTS[product](linear.weight.detach())
        self.many = self.few = product
        """The products of more than ``FEW`` rows, and of fewer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features] in the dtype of the weight."""
        rows = input.numel() // self.in_features
        if rows == 0:
            return plain(self, input)
        return self.few(self, input) if rows <= FEW else self.many(self, input)


def by_onednn(linear: PackedLinear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features], the layer's output by its weight in oneDNN's layout."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, linear.packed, linear.bias, "none", [], "")
    return output


def by_mkl(linear: PackedLinear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features], the layer's output by its weight in MKL's layout, for any number of rows but none.

    The operator takes the plain weight for numbers of rows other than the last argument.
    """
    rows = input.numel() // linear.in_features
    output: torch.Tensor = torch.ops.mkl._mkl_linear(input, linear.packed, linear.weight, linear.bias, rows)
    return output


LAYOUTS: dict[Product, Callable[[torch.Tensor], torch.Tensor]] = {
    by_mkl: lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS_OF_MKL),
    by_onednn: lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, ROWS),
}
"""Product -> the copy of a weight in its layout."""


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
    product = _product(list(linears))
    packed = {linear: PackedLinear(linear, product).train(linear.training) for linear in linears}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):  # with both names of a layer that has two
            if child in packed:
                setattr(module, name, packed[child])
    advise(_span(linear) for linear in packed.values())
    with_groups = [linear for linear in packed.values() if has_groups(linear)]
    few = fastest(with_groups, 1, product, by_groups, plain) if with_groups else product
    for linear in with_groups:
        linear.few = few


def _product(linears: Sequence[nn.Linear]) -> Product:
    """The product by packed weights that takes the least time here."""
    if not has_mkl() or any(linear.weight.dtype != torch.float32 for linear in linears):
        return by_onednn
    timed = some(linears)
    packed = {product: {linear: PackedLinear(linear, product) for linear in timed} for product in LAYOUTS}

    def trial(product: Product) -> Product:
        return lambda linear, input: product(packed[product][linear], input)

    trials = {trial(product): product for product in LAYOUTS}
    return trials[fastest(timed, ROWS, *trials)]


def has_mkl() -> bool:
    """True if this torch multiplies by weights in MKL's layout."""
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


def _span(linear: PackedLinear) -> tuple[int, int]:
    """(address, bytes) of the packed weight. MKL asks for more memory than it fills."""
    size = min(torch.ops.mkldnn._nbytes(linear.packed), linear.weight.nbytes)
    return torch.ops.mkldnn.data_ptr(linear.packed), size


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
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    products = {product.__name__ for linear in packed for product in (linear.many, linear.few)}
    return sorted(names | products | ({"packed"} if packed else set()))
