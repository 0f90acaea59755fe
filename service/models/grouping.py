"""Linear layers on a CPU whose products of few rows go by groups of the weight's rows.

``F.linear`` calls MKL's product of a matrix and a vector, or of two matrices. For few rows, both read the weight at a
third of the memory's bandwidth, and on one thread. MKL's batch of products (``cblas_sgemm_batch``, which ``torch.bmm``
calls) reads it at full speed, on every thread.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

GROUP = 64
"""Rows of the weight in one product. Groups of 4 to 128 take equal times."""
FEW = 2
"""Rows of the input for which the weight is the left factor of each product. Their sums are added in another order."""
MOST = 64
"""Rows of the input that several threads multiply faster by groups, to the bits of ``F.linear``."""
LEAST_WEIGHT = 1 << 16
"""Numbers of a weight below which the calls take longer than the product."""


class GroupedLinear(nn.Linear):
    """A linear layer with the parameters of ``linear``. Its outputs of up to ``FEW`` rows differ in their last bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., out_features] of float32 [..., in_features]."""
        rows = input.numel() // self.in_features
        if 0 < rows <= FEW or (rows and rows <= MOST and torch.get_num_threads() > 1):
            return by_groups(self, input, rows)
        return F.linear(input, self.weight, self.bias)


def by_groups(linear: nn.Linear, input: torch.Tensor, rows: int) -> torch.Tensor:
    """float32 [..., out_features], the layer's output for an input of so many ``rows`` in all."""
    groups = linear.weight.view(-1, GROUP, linear.in_features)
    x = input.reshape(rows, linear.in_features)
    if rows <= FEW:  # a column with the stride of a row: with a stride of 1, MKL takes seven times as long
        output = torch.bmm(groups, x.t().expand(len(groups), -1, -1))
        if rows > 1:  # each call counts beside the product of one row
            output = output.view(-1, rows).t().contiguous()
    else:
        output = torch.bmm(x.expand(len(groups), -1, -1), groups.transpose(1, 2)).transpose(0, 1).contiguous()
    output = output.view(*input.shape[:-1], linear.out_features)
    return output if linear.bias is None else output + linear.bias


def has_groups(linear: nn.Linear) -> bool:
    """True if MKL multiplies the weight, and it divides into groups. Weights of quantized layers or ranks are no plain
    tensors."""
    weight = linear.weight.detach()
    plain = type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
    divides = linear.out_features % GROUP == 0 and weight.numel() >= LEAST_WEIGHT
    return plain and divides and weight.is_contiguous() and torch.backends.mkl.is_available()


def group(model: nn.Module) -> None:
    """Replace the linear layers that have groups."""
    grouped = {
        module: GroupedLinear(module).train(module.training)
        for module in model.modules()
        if type(module) is nn.Linear and has_groups(module)
    }
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in grouped:
                setattr(module, name, grouped[child])


def is_grouped(model: Any) -> bool:
    """True if a layer of the model computes by groups."""
    return any(isinstance(module, GroupedLinear) for module in model.modules())
