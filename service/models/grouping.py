"""Linear layers on a CPU whose products of few rows go by groups of the weight's rows.

``F.linear`` calls MKL's product of a matrix and a vector, or of two matrices. For few rows on AMD's processors, both
read the weight at a third of the memory's bandwidth, on one thread. MKL's batch of products reads it at full speed, on
every thread (``cblas_sgemm_batch``, which ``torch.bmm`` calls). On Intel's processors, the batch takes twice the time.
So both products are timed.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from service.models.products import fastest

GROUP = 64
"""Rows of the weight in one product. Groups of 4 to 128 take equal times."""
FEW = 2
"""Rows of the input for which the weight is the left factor of each product. Their sums are added in another order."""
MOST = 64
"""Rows of the input that several threads multiply faster by groups, to the bits of ``F.linear``."""
SOME = 16
"""Rows for which both products are timed on several threads."""
DTYPES = torch.float32, torch.bfloat16
LEAST_WEIGHT = 1 << 16
"""Numbers of a weight below which the calls take longer than the product."""


class GroupedLinear(nn.Linear):
    """A linear layer with the parameters of ``linear`` that multiplies up to ``most`` rows by groups.

    Its outputs of up to ``FEW`` rows differ in their last bits.
    """

    def __init__(self, linear: nn.Linear, most: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.most = linear.weight, linear.bias, most

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features] in the dtype of the weight."""
        rows = input.numel() // self.in_features
        return by_groups(self, input) if 0 < rows <= self.most else plain(self, input)


def plain(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """``F.linear`` by the layer's weight, for a layer that multiplies in another way."""
    return F.linear(input, linear.weight, linear.bias)


def by_groups(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """[..., out_features], the layer's output for an ``input`` of one row at least."""
    groups = linear.weight.view(-1, GROUP, linear.in_features)
    x = input.reshape(-1, linear.in_features)
    rows = len(x)
    if rows <= FEW:  # a column with the stride of a row: with a stride of 1, MKL takes seven times as long
        output = torch.bmm(groups, x.t().expand(len(groups), -1, -1))
        if rows > 1:  # each call counts beside the product of one row
            output = output.view(-1, rows).t().contiguous()
    else:
        output = torch.bmm(x.expand(len(groups), -1, -1), groups.transpose(1, 2)).transpose(0, 1).contiguous()
    output = output.view(*input.shape[:-1], linear.out_features)
    return output if linear.bias is None else output + linear.bias


def has_groups(linear: nn.Linear) -> bool:
    """True if the weight divides into groups, and torch has MKL. Weights of quantized layers or ranks are no plain
    tensors."""
    weight = linear.weight.detach()
    is_plain = type(weight) is torch.Tensor and weight.device.type == "cpu" and weight.dtype in DTYPES
    divides = linear.out_features % GROUP == 0 and weight.numel() >= LEAST_WEIGHT
    return is_plain and divides and weight.is_contiguous() and torch.backends.mkl.is_available()


def most_rows(model: nn.Module) -> int:
    """Rows up to which this processor multiplies faster by groups: 0, ``FEW``, or ``MOST`` with several threads."""
    linears = _with_groups(model)
    if not linears or fastest(linears, 1, plain, by_groups) is plain:
        return 0
    on_several = torch.get_num_threads() > 1 and fastest(linears, SOME, plain, by_groups) is by_groups
    return MOST if on_several else FEW


def group(model: nn.Module, most: int) -> None:
    """Replace the linear layers that have groups, for products of up to ``most`` rows; for 0, none."""
    grouped = {linear: GroupedLinear(linear, most).train(linear.training) for linear in _with_groups(model) if most}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if child in grouped:
                setattr(module, name, grouped[child])


def _with_groups(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear and has_groups(module)]
