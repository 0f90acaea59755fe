"""The fastest computation: which one is chosen, and how often each runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from patches import timing
from patches.timing import LEAST, ROUNDS, fastest


class Clock:
    """Time that passes in computations only. The first one is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.runs: list[float] = []
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def run(self, cost: float) -> Callable[[], None]:
        def work() -> None:
            self.now += cost + (0.05 if not self.runs else 0.0)
            self.runs.append(cost)

        return work


@pytest.mark.parametrize(
    ("costs", "chosen"), [((20, 19), 0), ((10, 8), 1), ((7, 10), 0), ((10, 7, 6), 2), ((10, 8, 7.5), 1)]
)
def test_the_fastest(costs: tuple[float, ...], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one replaces an earlier one by a tenth of its time at least."""
    clock = Clock(monkeypatch)
    assert fastest([clock.run(cost / 1000) for cost in costs]) == chosen
    assert {cost / 1000 for cost in costs} == set(clock.runs)


@pytest.mark.parametrize(("cost", "rounds"), [(0.001, ROUNDS), (0.03, 4), (10.0, LEAST)])
def test_slow_ones_have_few_rounds(cost: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fastest([clock.run(cost)])
    assert len(clock.runs) == 1 + rounds
