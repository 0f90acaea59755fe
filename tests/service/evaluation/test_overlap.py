"""Cautions about documents: those that share text, by sets of windows, and one that has most of the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from service.evaluation.overlap import MOST_WINDOWS, WINDOW, overlaps
from service.evaluation.results import Overlap
from service.figures import pictures_of
from service.reports.terminal import table_of
from tests.service.results import result_of


def documents() -> list[list[int]]:
    """Two texts, a prefix of the first, a part of the second within new text, and a short one."""
    rng = np.random.default_rng(7)
    first, second, new = (rng.integers(0, 500, 3000).tolist() for _ in range(3))
    return [first, second, first[:1000], [*new[:1000], *second[500:1500], *new[1000:2000]], new[2500:2510]]


def windows(token_ids: list[int]) -> set[tuple[int, ...]]:
    return {tuple(token_ids[at : at + WINDOW]) for at in range(len(token_ids) - WINDOW + 1)}


def test_shares_are_those_of_sets_of_windows() -> None:
    given = documents()
    found = overlaps(given)
    assert found.keys() == {2, 3}
    for index, earlier in ((2, 0), (3, 1)):
        a, b = windows(given[index]), windows(given[earlier])
        assert found[index] == (earlier, pytest.approx(len(a & b) / min(len(a), len(b))))


def test_a_sample_of_the_windows_of_long_documents_suffices() -> None:
    rng = np.random.default_rng(7)
    first = rng.integers(0, 500, 2 * MOST_WINDOWS).tolist()
    part = [*rng.integers(0, 500, 40_000).tolist(), *first[100_000:160_000]]
    assert overlaps([first, part]) == {1: (0, pytest.approx(0.6, abs=0.02))}


@pytest.mark.parametrize("count", [0, 1])
def test_one_document_shares_with_none(count: int) -> None:
    assert overlaps(documents()[:count]) == {}


def test_results_caution_in_words_tables_and_pictures() -> None:
    result = result_of({"default": [6.0], "a": [6.1]}, [256], documents=("a.txt", "b.txt", "c.txt"))
    assert result.cautions() == []
    result.documents[2].overlap = Overlap(document=0, share=0.6)
    caution = "Intervals take documents as independent, but c.txt and a.txt share 60 % of the shorter text."
    assert result.words()[-1] == caution
    assert caution in str(table_of(result, 80).caption)
    assert caution in pictures_of(result)[0].caption


def test_a_document_with_most_of_the_scored_tokens_is_named() -> None:
    result = result_of({"default": [6.0]}, [256], documents=("a.txt", "b.txt", "c.txt"))
    at = result.methods[0].lengths[0]
    at.groups = [(10.0, 250), (30.0, 500), (10.0, 250)]
    assert result.cautions() == []
    at.groups = [(10.0, 100), (30.0, 800), (10.0, 100)]
    (caution,) = result.cautions()
    assert caution == "b.txt has 80 % of the scored tokens. Intervals are over documents, so they are wide beside it."
    assert result.words()[-1] == caution
    at.groups = [(10.0, 100), (30.0, 800), (10.0, 0)]
    assert result.cautions() == [], "two documents have no interval"
    alone = result_of({"default": [6.0]}, [256], documents=("a.txt",))
    alone.methods[0].lengths[0].groups = at.groups
    assert alone.cautions() == [], "of one document, groups are its blocks"
