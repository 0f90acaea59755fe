"""The fastest of several products by the same weights, timed on this processor.

Libraries choose kernels by the maker and the instructions of the processor, so each machine has its fastest products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from service.models.linear.products import Product

BYTES = 1 << 26
"""Bytes of weights that are multiplied by few rows, one layer at least: more than a core's cache."""
ROWS = 16
"""Rows from which on arithmetic takes the time, and less of the weights is enough."""
ROUNDS = 7
"""Runs of each product in turn. The fastest run counts, since other work only slows a run down."""
LIMIT_S = 0.3
"""Seconds after which no other round begins, behind two. The first one compiles kernels."""
GAIN = 0.9
"""A product replaces one before it if it takes less than this part of its time, so noise decides little."""


@torch.no_grad()
def fastest(linears: Sequence[nn.Linear], rows: int, *products: Product) -> Product:
    """The product that takes the least time for so many ``rows``; an earlier one of ``products`` if times are like."""
    timed = some(linears, BYTES * ROWS // max(ROWS, rows))
    cases = [(linear, linear.weight.new_ones(rows, linear.in_features)) for linear in timed]
    times = [float("inf")] * len(products)
    start = time.perf_counter()
    for done in range(ROUNDS):
        if done > 1 and time.perf_counter() - start > LIMIT_S:
            break
        for index, product in enumerate(products):
            began = time.perf_counter()
            for linear, input in cases:
                product(linear, input)
            times[index] = min(times[index], time.perf_counter() - began)
    best = 0
    for index, taken in enumerate(times):
        if taken < GAIN * times[best]:
            best = index
    return products[best]


def some(linears: Sequence[nn.Linear], size: int = BYTES) -> list[nn.Linear]:
    """The first of ``linears`` that have ``size`` bytes together, one at least."""
    first, left = [linears[0]], size - linears[0].weight.nbytes
    for linear in linears[1:]:
        left -= linear.weight.nbytes
        if left < 0:
            break
        first.append(linear)
    return first
