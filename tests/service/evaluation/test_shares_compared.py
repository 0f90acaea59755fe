"""Shares of results beside each other: paired differences, by Newcombe's interval and exact tests."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scipy import stats

from service.evaluation.comparison.checks import Named, NotComparable
from tests.service.evaluation.comparing import (
    BEFORE,
    DOCUMENTS,
    OTHER,
    change_of,
    compared,
    passkey,
    perplexity,
    setup_of,
)
from tests.service.figures import measured


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((12, 9, 2, 21), "better"),
        ((12, 2, 9, 21), "worse"),
        ((5, 5, 4, 5), "unsure"),
        ((1, 9, 6, 1), "unsure"),
        ((0, 9, 0, 9), "better"),
        ((9, 0, 9, 0), "worse"),
        ((9, 9, 0, 0), "better"),
        ((0, 0, 9, 9), "worse"),
    ],
    ids=["alike", "swapped", "less alike than the correction", "unlike", *["all alike"] * 4],
)
def test_the_interval_is_newcombes_for_paired_proportions(counts: tuple[int, int, int, int], verdict: str) -> None:
    """Newcombe 1998, Statistics in Medicine 17, p. 2635-2650: method 10."""
    both, first, second, neither = counts
    a = [1.0] * both + [1.0] * first + [0.0] * second + [0.0] * neither
    b = [1.0] * both + [0.0] * first + [1.0] * second + [0.0] * neither
    change, interval = change_of(compared([passkey("b", b), passkey("a", a)]))
    n = len(a)
    margins = math.prod((both + first, second + neither, both + second, first + neither))
    above = both * neither - first * second
    corrected = max(above - n / 2, 0) if above > 0 else above
    phi = corrected / math.sqrt(margins) if margins else 0.0
    (low1, high1), (low2, high2) = (
        stats.binomtest(round(sum(one)), n).proportion_ci(0.95, method="wilson") for one in (a, b)
    )
    p1, p2 = sum(a) / n, sum(b) / n
    low = math.sqrt((p1 - low1) ** 2 - 2 * phi * (p1 - low1) * (high2 - p2) + (high2 - p2) ** 2)
    high = math.sqrt((high1 - p1) ** 2 - 2 * phi * (high1 - p1) * (p2 - low2) + (p2 - low2) ** 2)
    assert change.value == pytest.approx(p1 - p2)
    assert interval.low == pytest.approx(p1 - p2 - low, rel=1e-6)
    assert interval.high == pytest.approx(p1 - p2 + high, rel=1e-6)
    assert change.verdict == verdict


def test_equal_shares_are_equal() -> None:
    result = compared([passkey("a", [0.0] * 4), passkey("b", [0.0] * 4)])
    change, _ = change_of(result)
    assert (change.verdict, change.value) == ("equal", 0.0)
    assert result.sentences()[1].startswith("At 512 tokens, default (b) differs from default (a) by +0 ")


def test_other_prompts_are_refused() -> None:
    with pytest.raises(NotComparable, match="seed is 0 in a and 1 in b"):
        compared([passkey("a", [1.0]), passkey("b", [1.0], seed=1)])


def test_prompts_of_another_tokenizer_are_not_the_same_ones() -> None:
    """Their text fills the length in other tokens, so scores are not paired."""
    same = compared([passkey("a", [1.0, 0.0] * 9), passkey("b", [1.0, 0.0] * 9)])
    named = [passkey("a", [1.0, 0.0] * 9), passkey("b", [1.0, 0.0] * 9, bos=True)]
    for name, result in named:
        result.setup = setup_of(name)
    other = compared(named)
    (equal, paired), (unsure, alone) = change_of(same), change_of(other)
    assert (equal.verdict, unsure.verdict) == ("equal", "unsure")
    assert alone.low < 2 * paired.low < 0, "the correction for continuity keeps some doubt"
    assert other.cautions() == ["The tokenizer of b is not that of a: prompts of one length have other texts."]


@pytest.mark.parametrize(
    ("change", "agree"),
    [({"tokens": 9, "tokens_sha256": "9" * 64}, True), ({"bytes": 9}, False), ({"bytes": 9, "cut_from": 9}, True)],
)
def test_documents_of_two_tokenizers_have_the_same_bytes_unless_one_is_cut(change: dict[str, Any], agree: bool) -> None:
    for swapped in (False, True):
        documents = [DOCUMENTS[:1], [DOCUMENTS[0].model_copy(update=change)]]
        named = [passkey(name, [1.0], documents=each) for name, each in zip("ab", documents, strict=True)]
        for name, result in named:
            result.setup = setup_of(name)
        if agree:
            assert compared(named[::-1] if swapped else named).shared_lengths == [512]
        else:
            with pytest.raises(NotComparable, match="document 1 is text 0"):
                compared(named[::-1] if swapped else named)


def test_equal_shares_of_other_prompts_are_not_equal() -> None:
    change, interval = change_of(compared([passkey("a", [1.0, 0.0] * 4), passkey("b", [0.0, 1.0] * 4)]))
    assert (change.value, change.verdict) == (0.0, "unsure")
    assert interval.low < -0.4


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"bos": True}, "bos is False in a and True in b"),
        ({"documents": DOCUMENTS[:1]}, "document 1 is absent in a"),
        ({"digits": 6}, "digits is 5 in a and 6 in b"),
    ],
)
def test_prompts_of_one_tokenizer_must_agree(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(NotComparable, match=why):
        compared([passkey("a", [1.0]), passkey("b", [1.0], **fields)])


def test_cautions_of_the_results_stay() -> None:
    named = [Named(name, measured.long_perplexity()) for name in "ab"]
    alone = named[0].result.cautions()
    assert alone
    assert compared(named).cautions() == alone


def test_doubt_about_the_best_is_that_of_paired_numbers() -> None:
    """Shares of prompts are not paired beside their own intervals: the changes alone speak of them."""
    scored = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": OTHER})]).sentences()
    shares = compared([passkey("a", [1.0] * 5 + [0.0] * 3), passkey("b", [1.0] * 4 + [0.0] * 4)]).sentences()
    assert scored[1] == "By 95 % intervals it is not surely better than default (b)."
    assert [len(scored), len(shares)] == [3, 2]
    assert shares[1].startswith("At 512 tokens, default (b) differs from default (a)")


def test_differences_by_length_are_in_points() -> None:
    changes = compared([passkey("a", [0.0] * 16), passkey("b", [1.0] * 8 + [0.0] * 8)]).changes()
    assert changes is not None
    assert changes.title == "Share found against default (a) by context length: difference in points"
    assert (changes.by_method[0][512].text, changes.by_method[0][512].is_sure) == ("+50", True)
