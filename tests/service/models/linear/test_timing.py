"""The fastest product of some layers, and how much of them is timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patches.timing import ROUNDS
from service.models.linear import timing
from service.models.linear.products import plain
from service.models.linear.timing import ROWS, fastest


def layer() -> nn.Linear:
    return nn.Linear(512, 192, bias=False).requires_grad_(False)


def test_the_fastest_product() -> None:
    def slow(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            plain(linear, input)
        return plain(linear, input)

    assert fastest([layer(), layer()], 3, slow, plain) is plain
    assert fastest([layer(), layer()], 3, plain, slow) is plain


def timed(linears: list[nn.Linear], rows: int) -> list[int]:
    """Rows of the weight of each layer that is timed, in the order of a round."""
    seen = []

    def product(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        seen.append(linear.out_features)
        assert torch.equal(linear.weight, linears[0].weight[: linear.out_features])
        return plain(linear, input)

    fastest(linears, rows, product)
    return seen[: len(seen) // (1 + ROUNDS)]


def test_a_part_of_the_weights_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes bound it: more rows take longer, and a vocabulary takes seconds."""
    linears = [layer()] * 3
    size = linears[0].weight.nbytes
    monkeypatch.setattr(timing, "BYTES", 2 * size)
    assert timed(linears, 1) == timed(linears, ROWS) == [192, 192]
    assert timed(linears, 2 * ROWS) == [192]
    assert timed(linears, 4 * ROWS) == [64]
    monkeypatch.setattr(timing, "BYTES", 1)
    assert timed(linears, 1) == [64]
