"""The fastest of several products by the same weights, timed on this processor.

Libraries choose kernels by the maker and the instructions of the processor, so each machine has its fastest product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

BYTES = 1 << 26
"""Bytes of weights that are multiplied, one layer at least: more than a core's cache."""
ROUNDS = 7
"""Runs of each product in turn. The fastest run counts, since other work only slows a run down."""
GAIN = 0.9
"""A product replaces the first one if it takes less than this part of its time."""

Linear = TypeVar("Linear", bound=nn.Linear)


@torch.no_grad()
def fastest(
    linears: Sequence[Linear], rows: int, *products: Callable[[Linear, torch.Tensor], torch.Tensor]
) -> Callable[[Linear, torch.Tensor], torch.Tensor]:
    """The product that takes the least time for so many ``rows``; the first of ``products`` unless another gains."""
    cases = [(linear, linear.weight.new_ones(rows, linear.in_features)) for linear in some(linears)]
    times = [float("inf")] * len(products)
    for _ in range(ROUNDS):
        for index, product in enumerate(products):
            began = time.perf_counter()
            for linear, input in cases:
                product(linear, input)
            times[index] = min(times[index], time.perf_counter() - began)
    best = min(range(len(products)), key=times.__getitem__)
    return products[best if times[best] < GAIN * times[0] else 0]


def some(linears: Sequence[Linear]) -> list[Linear]:
    """The first of ``linears`` that have ``BYTES`` together, one at least."""
    first, size = [linears[0]], linears[0].weight.nbytes
    for linear in linears[1:]:
        size += linear.weight.nbytes
        if size > BYTES:
            break
        first.append(linear)
    return first
