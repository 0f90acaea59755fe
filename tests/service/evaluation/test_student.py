"""Student's t: published quantiles, and intervals of few values that cover as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from service.evaluation.recommend.evidence import Evidence
from service.evaluation.scoring.places import Place, Places
from service.evaluation.statistics.per_token import interval_of, paired_probability, ratio_of, surely_apart
from service.evaluation.statistics.pieces import pieces_of
from service.evaluation.statistics.student import Mean, distribution, mean_of, quantile

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 7: 2.3646, 30: 2.0423, 1000: 1.9623, 10**6: 1.95997}


def test_quantiles_are_those_of_the_published_table() -> None:
    assert {freedom: pytest.approx(quantile(freedom), abs=1e-4) for freedom in TABLE} == TABLE


def test_the_distribution_is_symmetric_and_ends_at_0_and_1() -> None:
    for freedom in (1, 2, 3, 4, 9, 40):
        assert distribution(0.0, freedom) == 0.5
        assert distribution(1.3, freedom) + distribution(-1.3, freedom) == pytest.approx(1)
        assert (distribution(-np.inf, freedom), distribution(np.inf, freedom)) == (0, 1)
    assert distribution(1.0, 1) == pytest.approx(0.75)


def of_values(*values: float) -> Mean:
    found = mean_of([(value, 1) for value in values], 1)
    assert found is not None
    return found


@pytest.mark.parametrize("values", [3, 5, 8])
def test_intervals_of_few_values_cover_95_percent(values: int) -> None:
    drawn = np.random.default_rng(0).normal(1.0, 0.5, (2000, values))
    covered = np.mean([abs(of.mean() - 1) <= of_values(*of).half for of in drawn])
    assert 0.935 < covered < 0.965


def test_a_probability_of_three_values_is_no_certainty() -> None:
    mean, error = 0.2, 0.1 / 3**0.5
    assert of_values(0.1, 0.2, 0.3) == pytest.approx((mean, error, 2))
    assert (
        of_values(0.1, 0.2, 0.3).above
        == pytest.approx(distribution(mean / error, 2))
        == pytest.approx(0.9629, abs=1e-4)
    )
    assert of_values(0.5, 0.5, 0.5).above == 1.0
    assert of_values(0.0, 0.0, 0.0).above == 0.5


SIZES = {
    "equal": [762] * 5,
    "one has most": [762] * 4 + [30_480],
    "one of many has most": [762] * 11 + [30_480],
    "doubling": [254 * 2**index for index in range(7)],
    "a few tokens": [762] * 12 + [5],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_intervals_cover_whatever_the_sizes_of_documents(sizes: list[int]) -> None:
    """Documents differ by 0.3 nats and tokens by 2. By distances to the mean itself, 11 % cover where one has most."""
    generator, covered, sure = np.random.default_rng(4), [], []
    for _ in range(600):
        level = generator.normal(2.0, 0.3, len(sizes)) + generator.normal(0.0, 2.0, len(sizes)) / np.sqrt(sizes)
        groups = [(float(size * nll), size) for size, nll in zip(sizes, level, strict=True)]
        found = interval_of(groups, len(sizes))
        assert found is not None
        covered.append(found.low <= np.exp(2.0) <= found.high)
        sure.append(surely_apart(groups, [(2.0 * size, size) for size in sizes], 1.0))
    assert np.mean(covered) > 0.93
    assert np.mean(sure) < 0.07


def test_an_interval_is_wide_where_one_document_has_most_tokens() -> None:
    """It has most of the mean. The others show how far a document may be from the mean of all."""
    alone, beside = ([(2.0 * 762 + 762 * shift, 762) for shift in (-0.2, -0.1, 0.1, 0.2)] for _ in range(2))
    found = [interval_of(groups, 5) for groups in ([*alone, (2.0 * 762, 762)], [*beside, (2.0 * 30_480, 30_480)])]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].high - found[1].low > 1.5 * (found[0].high - found[0].low)


def test_a_document_of_a_few_tokens_hardly_counts() -> None:
    groups = [(762 * (2.0 + shift), 762) for shift in (-0.3, -0.2, -0.1, 0.1, 0.2, 0.3)]
    found = [interval_of(several, 7) for several in (groups, [*groups, (5 * 3.0, 5)])]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].high - found[1].low < 1.5 * (found[0].high - found[0].low)


def drawn(generator: np.random.Generator, windows: list[int]) -> tuple[np.ndarray, Places]:
    """Values of ``windows`` of documents that differ as much as their windows do, with a true mean of 2."""
    levels = 2.0 + generator.normal(0.0, 0.3, len(windows))
    values = np.concatenate([level + generator.normal(0.0, 0.3, n) for level, n in zip(levels, windows, strict=True)])
    places = [Place(document, 64 * stop) for document, n in enumerate(windows) for stop in range(n)]
    order = generator.permutation(len(places))
    return values[order], Places(tuple(places[index] for index in order), len(places))


@pytest.mark.parametrize("windows", [[8] * 4, [10] * 3, [1, 1, 1, 3, 3, 3], [1, 1, 30]])
def test_windows_of_a_document_count_together(windows: list[int]) -> None:
    """Of windows taken as independent, two thirds of the intervals cover, and a third where one has most."""
    generator, covered = np.random.default_rng(5), []
    for _ in range(600):
        values, places = drawn(generator, windows)
        found = mean_of(places.groups(values), 2)
        assert found is not None
        covered.append(abs(found.value - 2.0) <= found.half)
        assert found.value == pytest.approx(values.mean())
    assert np.mean(covered) > 0.93


@pytest.mark.parametrize("documents", [3, 5])
def test_perplexity_over_few_documents_covers_95_percent(documents: int) -> None:
    generator, covered = np.random.default_rng(1), []
    for _ in range(1000):
        found = interval_of([(float(64 * nll), 64) for nll in generator.normal(2.0, 0.3, documents)], documents)
        assert found is not None
        covered.append(found.low <= np.exp(2.0) <= found.high)
    assert 0.93 < np.mean(covered) < 0.97


def blocks_of(generator: np.random.Generator, blocks: int, correlation: float) -> list[tuple[float, int]]:
    """Groups of one document with a true mean NLL of 2: an AR(1) series of that lag-1 correlation."""
    noise = generator.normal(size=blocks) * np.sqrt(1 - correlation**2)
    values = [generator.normal()]
    for more in noise[1:]:
        values.append(correlation * values[-1] + more)
    return [(64 * (2 + 0.3 * value), 64) for value in values]


@pytest.mark.parametrize("correlation", [0.0, 0.26, 0.5, 0.7])
@pytest.mark.parametrize("blocks", [32, 256])
def test_intervals_of_one_document_cover_whatever_its_blocks_correlation(blocks: int, correlation: float) -> None:
    """Of blocks taken as independent, 87, 74 and 58 % of the intervals cover, by rising correlation."""
    generator, covered = np.random.default_rng(2), []
    for _ in range(600):
        found = interval_of(blocks_of(generator, blocks, correlation), 1)
        assert found is not None
        assert found.kind == "quarters"
        covered.append(found.low <= np.exp(2.0) <= found.high)
    assert 0.89 < np.mean(covered) < 0.98


def test_a_probability_knows_that_blocks_are_correlated() -> None:
    """Without a difference, a tenth of the comparisons are sure to 0.95; 47 % are if blocks count as independent."""
    generator, sure = np.random.default_rng(3), []
    level = pieces_of([(128.0, 64)] * 64, 1)
    for _ in range(600):
        found = paired_probability(pieces_of(blocks_of(generator, 64, 0.7), 1), level)
        assert found is not None
        sure.append(abs(found - 0.5) > 0.45)
    assert np.mean(sure) < 0.2


@pytest.mark.parametrize("blocks", [3, 4, 7])
def test_perplexity_over_few_blocks_covers_95_percent(blocks: int) -> None:
    generator, covered = np.random.default_rng(2), []
    for _ in range(1000):
        found = interval_of([(64 * nll, 64) for nll in generator.normal(2.0, 0.3, blocks)], 1)
        assert found is not None
        covered.append(found.low <= np.exp(2.0) <= found.high)
    assert 0.93 < np.mean(covered) < 0.97


def test_no_perplexity_is_below_1() -> None:
    found = interval_of([(1.0, 64), (9.0, 64), (200.0, 64)], 3)
    assert found is not None
    assert found.low == 1.0 < found.high


def test_two_values_have_no_interval_and_no_probability() -> None:
    groups = [(1.0, 64), (2.0, 64)]
    assert interval_of(groups, 1) is None
    assert interval_of(groups, 2) is None
    assert paired_probability(groups, groups) is None
    assert ratio_of(groups, [(3.0, 64), (7.0, 64)]) == (pytest.approx(np.exp((3.0 - 10.0) / 128)), None)


@pytest.mark.parametrize(
    ("documents", "every", "kind", "pieces"),
    [
        ([0] * 8, 64, "windows", [1] * 8),
        ([0] * 8, 63, "quarters", [2] * 4),
        ([0, 1] * 2, 4, "quarters", [1, 1, 2]),
        ([0, 1, 2, 0, 0, 0, 0, 1], 100, "documents", [1, 2, 5]),
    ],
)
def test_pieces_of_text_that_count_as_independent(
    documents: list[int], every: int, kind: str, pieces: list[int]
) -> None:
    places = Places(tuple(Place(document, 100 - index) for index, document in enumerate(documents)), every)
    groups = places.groups(np.arange(len(documents), dtype=np.float64))
    assert places.kind(len(documents)) == kind
    assert sorted(windows for _, windows in groups) == pieces
    assert sum(total for total, _ in groups) == sum(range(len(documents)))


def test_pieces_are_those_of_the_windows_that_were_read() -> None:
    places = Places(tuple(Place(document, 10) for document in (0, 0, 1, 1, 2, 2)), 40)
    assert [places.kind(read) for read in (3, 4, 5, 6)] == ["windows", "windows", "documents", "documents"]
    dense = Places(tuple(Place(0, stop) for stop in range(8)), 40)
    assert [dense.kind(read) for read in (5, 6)] == ["windows", "quarters"]


def test_quarters_are_neighbours_in_the_text() -> None:
    stops = [700, 100, 500, 300, 800, 200, 600, 400]
    places = Places(tuple(Place(0, stop) for stop in stops), 8)
    assert places.groups(np.array(stops, np.float64)) == [(300, 2), (700, 2), (1100, 2), (1500, 2)]
    assert places.groups(np.array(stops[:3], np.float64)) == [(100, 1), (500, 1), (700, 1)]


def test_two_windows_have_no_interval() -> None:
    places = Places(tuple(Place(0, stop) for stop in (10, 20, 30)), 100)
    zeros = np.zeros(3)
    few, enough = (
        Evidence(nll, nll, zeros, zeros, False, places) for nll in (np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0]))
    )
    assert few.above(enough).interval is None
    found = enough.above(Evidence(zeros, zeros, zeros, zeros, False, places)).interval
    assert found is not None
    assert found.kind == "windows"
    assert (found.low, found.high) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
