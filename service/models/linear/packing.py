"""Weights of linear layers in the layout of a library's matrix products, which a CPU otherwise makes in every call.

oneDNN: https://uxlfoundation.github.io/oneDNN/dev_guide_matmul.html, section "memory formats". MKL: its reference of
``cblas_?gemm_pack``. The compiler of torch itself freezes weights by the same operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from service.models.huge_pages import advise
from service.models.linear.layers import UNBOUNDED, ChosenLinear, choose, ordinary, replace
from service.models.linear.products import Product, has_onednn, in_sizes
from service.models.linear.timing import fastest, some

ROWS = 16
"""Rows for which both layouts are timed, and for which oneDNN's is made. Made for 8 to 512 rows, it is as fast, and
slower for a single one."""
ROWS_OF_MKL = 64
"""Rows for which MKL's layout is made. Made for 16 rows, it is slower for more, and for 512, on several threads."""


class NotPacked(ValueError):
    """The model's weights cannot be packed."""


class PackedLinear(ChosenLinear):
    """A linear layer that computes with a second copy of its weight, in the layout of ``product``.

    A changed ``weight`` has no effect.
    """

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        super().__init__(linear, ((UNBOUNDED, product),))
        self.packed = LAYOUTS[product](linear.weight.detach())


def by_packed_onednn(linear: PackedLinear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features], the layer's output by its weight in oneDNN's layout."""
    return in_sizes(input, linear.packed, linear.bias, linear.out_features)


def by_packed_mkl(linear: PackedLinear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features], the layer's output by its weight in MKL's layout, for any number of rows but none.

    The operator takes the plain weight for numbers of rows other than the last argument.
    """
    rows = input.numel() // linear.in_features
    output: torch.Tensor = torch.ops.mkl._mkl_linear(input, linear.packed, linear.weight, linear.bias, rows)
    return output


LAYOUTS: dict[Product, Callable[[torch.Tensor], torch.Tensor]] = {
    by_packed_mkl: lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS_OF_MKL),
    by_packed_onednn: lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, ROWS),
}
"""Product -> the copy of a weight in its layout."""


def pack(model: nn.Module) -> None:
    """Replace the linear layers of a model on the CPU.

    Raises:
        NotPacked: for another device, for a dtype without products of this processor, without a plain linear layer, or
            without oneDNN.
    """
    if not has_onednn(torch.float32):
        raise NotPacked("this torch has no oneDNN")
    linears = ordinary(model)
    if not linears:
        raise NotPacked("it has no plain linear layer")
    for linear in linears:
        if linear.weight.device.type != "cpu" or not has_onednn(linear.weight.dtype):
            here = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if has_onednn(dtype)]
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in here)
            raise NotPacked(f"this CPU packs {names}, not {linear.weight.dtype} on {linear.weight.device}")
    product = _product(linears)
    packed = {linear: PackedLinear(linear, product) for linear in linears}
    advise(_span(linear) for linear in packed.values())
    choose(packed.values(), product)
    replace(model, packed)


def _product(linears: Sequence[nn.Linear]) -> Product:
    """The product by packed weights that takes the least time here."""
    if not has_mkl() or any(linear.weight.dtype != torch.float32 for linear in linears):
        return by_packed_onednn
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


def packed_bytes(model: Any) -> int:
    """Bytes of the packed copies."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, PackedLinear))
