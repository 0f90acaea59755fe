"""The fastest product of some layers, and how much of them is timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


def timed(linears: list[nn.Linear], rows: int) -> set[nn.Linear]:
    seen = set()

    def product(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        seen.add(linear)
        return plain(linear, input)

    fastest(linears, rows, product)
    return seen


def test_weights_of_a_few_layers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [layer() for _ in range(3)]
    monkeypatch.setattr(timing, "BYTES", 2 * linears[0].weight.nbytes)
    assert timed(linears, 1) == timed(linears, ROWS) == set(linears[:2])
    assert timed(linears, 2 * ROWS) == set(linears[:1]), "more rows take longer"
    monkeypatch.setattr(timing, "BYTES", 1)
    assert timed(linears, 1) == set(linears[:1])
