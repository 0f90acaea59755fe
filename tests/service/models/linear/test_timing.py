"""The fastest product: which one is chosen, and how much is timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from service.models.linear import timing
from service.models.linear.products import plain
from service.models.linear.timing import ROWS, fastest


def layer() -> nn.Linear:
    return nn.Linear(512, 192, bias=False).requires_grad_(False)


class Clock:
    """Time that passes in products only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.runs: list[float] = []
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def product(self, cost: float) -> Any:
        def multiply(linear: nn.Linear, input: torch.Tensor) -> torch.Tensor:
            assert input.shape == (3, 512)
            self.now += cost + (1.0 if not self.runs else 0.0)  # the first run is slow
            self.runs.append(cost)
            return plain(linear, input)

        return multiply


@pytest.mark.parametrize(
    ("costs", "chosen"), [((20, 19), 0), ((10, 8), 1), ((7, 10), 0), ((10, 7, 6), 2), ((10, 8, 7.5), 1)]
)
def test_the_fastest_product(costs: tuple[float, ...], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later product replaces an earlier one by a tenth of its time at least."""
    clock = Clock(monkeypatch)
    given = [clock.product(cost / 1000) for cost in costs]
    assert fastest([layer(), layer()], 3, *given) is given[chosen]
    assert {cost / 1000 for cost in costs} == set(clock.runs)


@pytest.mark.parametrize(("cost", "rounds"), [(0.001, 7), (0.1, 3), (10.0, 2)])
def test_slow_products_have_few_rounds(cost: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.runs.append(0)  # no slow run
    fastest([layer()], 3, clock.product(cost))
    assert len(clock.runs) == 1 + rounds


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
