"""Products of an input and a linear layer's weight on a CPU: the layer's output, each with its own rounding.

``F.linear`` calls MKL. On AMD's processors, it takes up to twice as long as others. It reads the weight
slowly for few rows, and for many it uses half of the instructions' width. On Intel's processors it is mostly the
fastest. So products are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

GROUP = 64
"""Rows of the weight in one product of ``by_groups``. Groups of 4 to 128 take equal times."""
SIZES = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512
"""Rows of one product by oneDNN. A product of any other number takes at most half of its rows more."""
DTYPES = torch.float32, torch.bfloat16
LEAST_WEIGHT = 1 << 16
"""Numbers of a weight below which the calls take longer than the product."""

Product = Callable[[Any, torch.Tensor], torch.Tensor]
"""[..., out_features] of a layer and its input [..., in_features], of one row at least unless it is ``plain``."""


def plain(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """``F.linear`` by the layer's weight, for a layer that multiplies in another way."""
    return F.linear(input, linear.weight, linear.bias)


def by_onednn(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """oneDNN's product by the weight as it is; oneDNN brings parts of it into its own layout meanwhile."""
    return in_sizes(input, linear.weight, linear.bias, linear.out_features)


def in_sizes(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """oneDNN's product [..., out_features] by ``weight`` in any layout, in parts of ``SIZES`` with rows of zeros.

    oneDNN compiles a kernel for each number of rows, in 0.6 ms, and keeps it, in 0.6 MB.
    """
    multiplied = torch.ops.mkldnn._linear_pointwise
    x = input.reshape(-1, input.shape[-1])
    if len(x) in SIZES:  # each call counts in a decode step
        whole: torch.Tensor = multiplied(input, weight, bias, "none", [], "")
        return whole
    outputs = []
    for part in x.split(SIZES[-1]):
        missing = next(size for size in SIZES if size >= len(part)) - len(part)
        padded = F.pad(part, (0, 0, 0, missing)) if missing else part
        outputs.append(multiplied(padded, weight, bias, "none", [], "")[: len(part)])
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.view(*input.shape[:-1], out_features)


def by_columns(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """MKL's product with the weight as the left factor."""
    output = torch.mm(linear.weight, input.reshape(-1, linear.in_features).t()).t().contiguous()
    output = output.view(*input.shape[:-1], linear.out_features)
    return output if linear.bias is None else output + linear.bias


def by_groups(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """MKL's batch of products by groups of the weight's rows (``cblas_sgemm_batch``, which ``torch.bmm`` calls)."""
    groups = linear.weight.view(-1, GROUP, linear.in_features)
    x = input.reshape(-1, linear.in_features)
    if len(x) == 1:  # a column with the stride of a row: with a stride of 1, MKL takes seven times as long
        output = torch.bmm(groups, x.t().expand(len(groups), -1, -1))
    else:
        output = torch.bmm(x.expand(len(groups), -1, -1), groups.transpose(1, 2)).transpose(0, 1).contiguous()
    output = output.view(*input.shape[:-1], linear.out_features)
    return output if linear.bias is None else output + linear.bias


def products_by(linear: nn.Linear) -> tuple[Product, ...]:
    """Products by the layer's own weight, ``plain`` first. Others need a plain tensor on the CPU, large enough.

    Weights of quantized layers or of ranks are no plain tensors.
    """
    weight = linear.weight.detach()
    is_plain = type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.is_contiguous()
    if not is_plain or weight.dtype not in DTYPES or weight.numel() < LEAST_WEIGHT:
        return (plain,)
    others = [by_onednn] if has_onednn(weight.dtype) else []
    if torch.backends.mkl.is_available():
        others += [by_columns, by_groups] if linear.out_features % GROUP == 0 else [by_columns]
    return plain, *others


def has_onednn(dtype: torch.dtype) -> bool:
    """True if this torch has oneDNN, and oneDNN multiplies these numbers on this processor."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    half = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype == torch.float32 or (dtype in half and bool(half[dtype]()))
