"""Student's t: published quantiles, and intervals of few values that cover as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from service.evaluation.recommend.evidence import over_windows
from service.evaluation.statistics import Scored, interval, interval_of, paired_probability
from service.evaluation.student import distribution, half_width, probability_above, quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 7: 2.3646, 30: 2.0423, 1000: 1.9623, 10**6: 1.95997}


def test_quantiles_are_those_of_the_published_table() -> None:
    assert {freedom: pytest.approx(quantile(freedom), abs=1e-4) for freedom in TABLE} == TABLE


def test_the_distribution_is_symmetric_and_ends_at_0_and_1() -> None:
    for freedom in (1, 2, 3, 4, 9, 40):
        assert distribution(0.0, freedom) == 0.5
        assert distribution(1.3, freedom) + distribution(-1.3, freedom) == pytest.approx(1)
        assert (distribution(-np.inf, freedom), distribution(np.inf, freedom)) == (0, 1)
    assert distribution(1.0, 1) == pytest.approx(0.75)


@pytest.mark.parametrize("values", [2, 3, 5, 8])
def test_intervals_of_few_values_cover_95_percent(values: int) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.5, (2000, values))
    covered = np.mean([abs(of.mean() - 1) <= half_width(of) for of in drawn])
    assert 0.935 < covered < 0.965


def test_a_probability_of_two_values_is_no_certainty() -> None:
    assert probability_above(np.array([0.1, 0.2])) == pytest.approx(0.8976, abs=1e-3)
    assert probability_above(np.array([0.1, 0.1])) == 1.0
    assert probability_above(np.array([0.0, 0.0])) == 0.5


@pytest.mark.parametrize("documents", [3, 5])
def test_perplexity_over_few_documents_covers_95_percent(documents: int) -> None:
    generator, covered = np.random.default_rng(1), []
    for _ in range(1000):
        found = interval_of([(float(64 * nll), 64) for nll in generator.normal(2.0, 0.3, documents)], "documents")
        assert found is not None
        covered.append(found.low <= np.exp(2.0) <= found.high)
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize("blocks", [3, 5])
def test_perplexity_over_few_blocks_covers_95_percent(blocks: int) -> None:
    generator, covered = np.random.default_rng(2), []
    for _ in range(1000):
        nll = np.repeat(generator.normal(2.0, 0.3, blocks), 64)
        found = interval([Scored(0, nll, 0, 1, 1)])
        assert found is not None
        covered.append(found.low <= np.exp(2.0) <= found.high)
    assert 0.93 < np.mean(covered) < 0.97


def test_two_values_have_no_interval_and_no_probability() -> None:
    groups = [(1.0, 64), (2.0, 64)]
    assert interval_of(groups, "documents") is None
    assert interval([Scored(0, np.ones(191), 0, 1, 1)]) is None
    assert paired_probability(groups, groups) is None
    assert over_windows(np.array([1.0, 2.0])) is None
    found = over_windows(np.array([1.0, 2.0, 3.0]))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
