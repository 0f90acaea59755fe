"""Evolution of factors as LongRoPE's algorithm 1 has it: pure functions of numbers and a generator of random ones.

The operators and their numbers are those of the paper's section 3.2 and of its released code. An individual has a
factor for each pair, which never falls from a pair to the next slower one. Here it has the factor on cos and sin too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Individual(NamedTuple):
    """The factor of each pair in hundredths, since the paper's step is 0.01, and the factor on cos and sin."""

    factors: tuple[int, ...]
    attention: float


ONE = 100
MOST = 1.25
"""The largest factor, divided by target length / trained length."""
MUTATES = 0.3
"""Probability that a mutation changes a pair."""
CROSSES = 0.3
"""Probability that a crossover takes a pair from the second parent."""
PARENTS = 1 / 2
MUTATIONS = 1 / 4
CROSSOVERS = 1 / 4
"""Parents and children of a generation, as shares of the population: 32, 16 and 16 of 64."""
TRIES = 20
"""For an individual that is new, as often as the code tries a crossover."""


@dataclass(frozen=True)
class Space:
    """Individuals of ``pairs`` factors from 1 to ``most`` hundredths, with one of the factors ``attention``."""

    pairs: int
    most: int
    attention: tuple[float, ...]

    @classmethod
    def of(cls, pairs: int, times: float, attention: Iterable[float]) -> Space:
        """The space of a model with ``pairs``, for ``times`` its trained length."""
        return cls(pairs, math.floor(MOST * times * ONE), tuple(sorted(set(attention))))

    def nearest(self, factors: Sequence[float], attention: float) -> Individual:
        """The individual with these factors, rounded and raised where they leave the space."""
        rounded = [min(max(round(factor * ONE), ONE), self.most) for factor in factors]
        return Individual(tuple(int(value) for value in np.maximum.accumulate(rounded)), attention)

    def room(self, factors: Sequence[int], pair: int) -> tuple[int, int]:
        """The least and the largest value of a pair between its neighbours."""
        low = factors[pair - 1] if pair else ONE
        return low, factors[pair + 1] if pair + 1 < self.pairs else self.most


def children_of(population: int) -> int:
    """Most new individuals of each generation after the first."""
    return int(population * MUTATIONS) + int(population * CROSSOVERS)


def first_generation(
    starts: Sequence[Individual], space: Space, population: int, rng: np.random.Generator
) -> tuple[Individual, ...]:
    """``starts``, and mutations of these in turn."""
    found = dict.fromkeys(starts)
    for index in range(population - len(found)):
        start = starts[index % len(starts)]
        _add(found, found, lambda start=start: mutated(start, space, rng))  # type: ignore[misc]
    return tuple(found)


def next_generation(
    losses: Mapping[Individual, float], space: Space, population: int, rng: np.random.Generator
) -> tuple[Individual, ...]:
    """New individuals only, from the best of all that have ``losses``; none where no new one was found."""
    ranked = sorted(losses, key=lambda one: (losses[one], one))
    parents = ranked[: max(2, round(population * PARENTS))]
    found: dict[Individual, None] = {}
    for _ in range(int(population * MUTATIONS)):
        _add(found, losses, lambda: mutated(_one(parents, rng), space, rng))
    for _ in range(int(population * CROSSOVERS)):
        if not _add(found, losses, lambda: crossed(*_two(parents, rng), space, rng)):
            _add(found, losses, lambda: mutated(_one(parents, rng), space, rng))
    return tuple(found)


def mutated(parent: Individual, space: Space, rng: np.random.Generator) -> Individual:
    """Some pairs have a new factor, drawn between their neighbours. The one on cos and sin is drawn as often."""
    factors, attention = list(parent.factors), parent.attention
    for pair in range(space.pairs):
        if rng.random() < MUTATES:
            low, high = space.room(factors, pair)
            factors[pair] = int(rng.integers(low, high, endpoint=True))
    if rng.random() < MUTATES:
        attention = space.attention[int(rng.integers(len(space.attention)))]
    return Individual(tuple(factors), attention)


def crossed(first: Individual, second: Individual, space: Space, rng: np.random.Generator) -> Individual:
    """``first`` with some factors of ``second``, where they lie between their neighbours."""
    factors = list(first.factors)
    for pair in range(space.pairs):
        low, high = space.room(factors, pair)
        if rng.random() < CROSSES and low <= second.factors[pair] <= high:
            factors[pair] = second.factors[pair]
    return Individual(tuple(factors), (second if rng.random() < CROSSES else first).attention)


def _one(parents: Sequence[Individual], rng: np.random.Generator) -> Individual:
    return parents[int(rng.integers(len(parents)))]


def _two(parents: Sequence[Individual], rng: np.random.Generator) -> tuple[Individual, Individual]:
    """Different ones, the better one first. One alone is both."""
    if len(parents) == 1:
        return parents[0], parents[0]
    first, second = sorted(rng.choice(len(parents), 2, replace=False).tolist())
    return parents[first], parents[second]


def _add(
    found: dict[Individual, None], known: Mapping[Individual, float | None], make: Callable[[], Individual]
) -> bool:
    """Add what ``make`` gives, once it is neither in ``known`` nor in ``found``; false if it gives nothing new."""
    for _ in range(TRIES):
        if (made := make()) not in known and made not in found:
            found[made] = None
            return True
    return False
