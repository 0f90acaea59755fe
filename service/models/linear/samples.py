"""Parts of a model's linear layers, on which products are timed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from service.models.linear.packing import pack
from service.models.linear.products import GROUP, Product
from service.models.linear.times import least_times
from service.models.memory import huge_pages

BYTES = 1 << 26
"""Bytes of weights that are multiplied by few rows, one layer at least: more than a core's cache."""
ROWS = 16
"""Rows from which on arithmetic takes the time, and less of the weights is enough."""


class Sample:
    """Copies of some ``linears``, as they lie in a served model: ``plain`` ones and ``packed`` ones.

    ``packed`` is empty if one of their weights cannot be packed.
    """

    def __init__(self, linears: Sequence[nn.Linear], size: int = BYTES) -> None:
        self.plain = [_with(linear, linear.weight.detach().clone()) for linear in _some(linears, size)]
        huge_pages.move(nn.ModuleList(self.plain))
        weights = [weight for linear in self.plain if (weight := pack(linear.weight.detach())) is not None]
        huge_pages.advise(weight.span() for weight in weights)
        is_whole = len(weights) == len(self.plain)
        self.packed = (
            [_with(linear, weight) for linear, weight in zip(self.plain, weights, strict=True)] if is_whole else []
        )

    @torch.no_grad()
    def times(self, rows: int, of_plain: Sequence[Product], of_packed: Sequence[Product]) -> list[float]:
        """Seconds of products by the plain and then the packed layers, for so many ``rows`` of input."""
        inputs = [linear.weight.new_ones(rows, linear.in_features) for linear in self.plain]

        def run(product: Product, linears: Sequence[nn.Linear]) -> None:
            for linear, input in zip(linears, inputs, strict=True):
                product(linear, input)

        runs = [partial(run, product, self.plain) for product in of_plain]
        return least_times([*runs, *(partial(run, product, self.packed) for product in of_packed)])


def _some(linears: Sequence[nn.Linear], size: int) -> list[nn.Linear]:
    """The first of ``linears`` that have ``size`` bytes together. A single one with more is cut to that."""
    first, left = [_cut(linears[0], size)], size - linears[0].weight.nbytes
    for linear in linears[1:]:
        left -= linear.weight.nbytes
        if left < 0:
            break
        first.append(linear)
    return first


def _cut(linear: nn.Linear, size: int) -> nn.Linear:
    """A layer with the first rows of the weight, in ``size`` bytes about: a vocabulary takes seconds."""
    rows = max(1, size // (linear.weight[0].nbytes * GROUP)) * GROUP
    return linear if rows >= linear.out_features else _with(linear, linear.weight.detach()[:rows])


def _with(linear: nn.Linear, weight: torch.Tensor) -> nn.Linear:
    """A layer of the inputs of ``linear`` with this ``weight``."""
    layer = nn.Linear(linear.in_features, len(weight), bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
