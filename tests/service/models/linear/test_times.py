"""Times of computations: which one is the fastest, and how often each runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest

from service.models.linear import times
from service.models.linear.times import LEAST, ROUNDS, first_of_fast, least_times


class Clock:
    """Time that passes in computations only. The first one is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.runs: list[float] = []
        monkeypatch.setattr(times, "time", SimpleNamespace(perf_counter=lambda: self.now))

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
    assert first_of_fast(least_times([clock.run(cost / 1000) for cost in costs])) == chosen
    assert {cost / 1000 for cost in costs} == set(clock.runs)


@pytest.mark.parametrize(("cost", "rounds"), [(0.001, ROUNDS), (0.03, 4), (10.0, LEAST)])
def test_slow_ones_have_few_rounds(cost: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert least_times([clock.run(cost)]) == [pytest.approx(cost)]
    assert len(clock.runs) == 1 + rounds


def test_runs_go_on_while_others_disturb_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is faster, but for 0.3 s something slows it down, more and more."""
    clock = Clock(monkeypatch)
    slowed = count(20, 3)

    def disturbed() -> None:
        clock.now += 0.001 * (7 if clock.now > 0.3 else next(slowed))

    assert least_times([clock.run(0.01), disturbed]) == [pytest.approx(0.01), pytest.approx(0.007)]
    assert clock.now < 0.5


def test_runs_that_are_always_disturbed_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    growing = count(1)

    def disturbed() -> None:
        clock.now += 0.01 * 0.9 ** next(growing)

    least_times([disturbed, clock.run(0.01)])
    assert 0.5 < clock.now < 0.6
