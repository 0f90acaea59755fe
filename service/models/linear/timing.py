"""The fastest of several products by the same weights, timed on this processor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from patches import fastest as fastest_run
from service.models.linear.products import GROUP, Product

BYTES = 1 << 26
"""Bytes of weights that are multiplied by few rows, one layer at least: more than a core's cache."""
ROWS = 16
"""Rows from which on arithmetic takes the time, and less of the weights is enough."""


@torch.no_grad()
def fastest(linears: Sequence[nn.Linear], rows: int, *products: Product) -> Product:
    """The product that takes the least time for so many ``rows``; an earlier one of ``products`` if times are like.

    Packed layers are timed whole.
    """
    timed = some(linears, BYTES * ROWS // max(ROWS, rows))
    cases = [(linear, linear.weight.new_ones(rows, linear.in_features)) for linear in timed]

    def run(product: Product) -> None:
        for linear, input in cases:
            product(linear, input)

    return products[fastest_run([partial(run, product) for product in products])]


def some(linears: Sequence[nn.Linear], size: int = BYTES) -> list[nn.Linear]:
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
    if rows >= linear.out_features or hasattr(linear, "packed"):
        return linear
    part = nn.Linear(linear.in_features, rows, bias=False, device="meta")
    part.weight = nn.Parameter(linear.weight[:rows], requires_grad=False)
    return part
