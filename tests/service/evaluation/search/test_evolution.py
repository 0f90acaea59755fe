"""The evolution, without a model."""

from __future__ import annotations

import math

import numpy as np

from service.evaluation.search.evolution import (
    ONE,
    Individual,
    Space,
    children_of,
    crossed,
    first_generation,
    mutated,
    next_generation,
)

PAIRS, TIMES = 8, 4.0
ATTENTION = (1.0, 1.1, 1.14)
SPACE = Space.of(PAIRS, TIMES, [1.14, 1.0, 1.1, 1.0])
LEVEL = Individual((400,) * PAIRS, 1.0)
RISING = Individual(tuple(100 + 43 * pair for pair in range(PAIRS)), 1.14)
STARTS = [LEVEL, RISING]
WANTED = (100, 100, 130, 210, 340, 400, 420, 480)


def loss(individual: Individual) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(individual.factors, WANTED, strict=True))


def evolved(generations: int, seed: int = 0, population: int = 24) -> list[tuple[Individual, ...]]:
    bred = [first_generation(STARTS, SPACE, population, np.random.default_rng([seed, 0]))]
    while len(bred) < generations:
        losses = {individual: loss(individual) for generation in bred for individual in generation}
        bred.append(next_generation(losses, SPACE, population, np.random.default_rng([seed, len(bred)])))
    return bred


def alike(first: Individual, second: Individual) -> int:
    """Pairs with equal factors."""
    return sum(a == b for a, b in zip(first.factors, second.factors, strict=True))


def test_the_space_is_the_papers() -> None:
    assert Space(PAIRS, 500, ATTENTION) == SPACE, "1.25 times the extension, in steps of 0.01"
    assert Space.of(PAIRS, 8.0, ATTENTION).most == 1000
    expected = (100, 100, 101, 300, 300, 500, 500, 500)
    assert SPACE.nearest([0.5, 1.004, 1.006, 3, 2.9, 9, 9, 9], 1.1) == (expected, 1.1)


def test_every_individual_is_new_and_inside_the_space() -> None:
    bred = evolved(8)
    everyone = [individual for generation in bred for individual in generation]
    assert len(set(everyone)) == len(everyone)
    for individual in everyone:
        assert list(individual.factors) == sorted(individual.factors)
        assert individual.factors[0] >= ONE
        assert individual.factors[-1] <= SPACE.most
        assert len(individual.factors) == PAIRS
        assert individual.attention in ATTENTION
    assert [len(generation) for generation in bred] == [24, *[12] * 7]
    assert bred[0][:2] == tuple(STARTS)
    assert children_of(64) == 32
    assert all(0 < 2 * children_of(population) <= population for population in range(4, 65))


def test_a_later_generation_comes_closer() -> None:
    bred = evolved(20)
    best = [min(map(loss, generation)) for generation in bred]
    assert min(best) < 0.5 * min(map(loss, STARTS))
    assert np.argmin(best) > 5


def test_only_the_best_have_children() -> None:
    """Half of a population are parents: of four the best two. The others share no factor with these."""
    poor = {Individual(tuple(range(first, first + PAIRS)), 1.0): 9.0 + first for first in range(101, 141, 8)}
    losses = {LEVEL: 0.0, RISING: 1.0, **poor}
    for seed in range(50):
        for child in next_generation(losses, SPACE, 4, np.random.default_rng(seed)):
            shared = [alike(child, parent) for parent in (LEVEL, RISING)]
            assert max(shared) > 1


def test_it_is_a_function_of_the_seed() -> None:
    assert evolved(5) == evolved(5)
    assert evolved(5) != evolved(5, seed=1)


def test_a_mutation_changes_some_pairs_between_their_neighbours() -> None:
    rng = np.random.default_rng(0)
    children = [mutated(RISING, SPACE, rng) for _ in range(400)]
    changed = [PAIRS - alike(child, RISING) for child in children]
    assert 0.2 * PAIRS < np.mean(changed) < 0.3 * PAIRS, "a draw may also be the old factor"
    attention = [child.attention for child in children]
    assert set(attention) == set(ATTENTION)
    assert 0.15 < np.mean([value != RISING.attention for value in attention]) < 0.25, "two thirds of the draws are new"
    lasts = {mutated(LEVEL, SPACE, rng).factors[-1] for _ in range(200)}
    assert max(lasts) > 400, "the slowest pair may go beyond linear interpolation"


def test_a_crossover_has_factors_of_both() -> None:
    rng = np.random.default_rng(0)
    second = Individual(tuple(value + 7 for value in RISING.factors), 1.0)
    children = [crossed(RISING, second, SPACE, rng) for _ in range(200)]
    assert 0.2 * PAIRS < np.mean([alike(child, second) for child in children]) < 0.4 * PAIRS
    assert 0.2 < np.mean([child.attention == second.attention for child in children]) < 0.4
    for child in children:
        both = zip(RISING.factors, second.factors, strict=True)
        assert all(value in either for value, either in zip(child.factors, both, strict=True))
        assert list(child.factors) == sorted(child.factors)
    for child in (crossed(LEVEL, RISING, SPACE, rng) for _ in range(100)):
        assert list(child.factors) == sorted(child.factors)


def test_a_space_without_new_individuals_ends_the_search() -> None:
    space = Space(2, ONE, (1.0,))
    alone = Individual((ONE, ONE), 1.0)
    assert first_generation([alone], space, 8, np.random.default_rng(0)) == (alone,)
    assert next_generation({alone: 1.0}, space, 8, np.random.default_rng(0)) == ()
