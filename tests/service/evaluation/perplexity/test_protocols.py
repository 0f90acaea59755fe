"""Windows of the five protocols, against the golden vectors and by their definitions."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from service.evaluation.documents import from_text, from_token_ids
from service.evaluation.perplexity import protocols
from service.evaluation.statistics.per_token import (
    Scored,
    groups_of,
    interval_of,
    length_result,
    paired_probability,
    position_buckets,
    surely_apart,
)
from service.evaluation.statistics.pieces import pieces_of
from tests.service.conftest import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def nll(token: int, context: int) -> float:
    return 2 + 1.5 / math.sqrt(context + 1) + 0.25 * math.sin(0.7 * token)


def test_sliding_is_the_yarn_protocol(shared: Path) -> None:
    golden = json.loads((shared / "golden" / "ppl_protocols.json").read_text())
    for case in golden["cases"]:
        windows = protocols.sliding(case["D"], case["L"], case["stride"])
        as_published = [[w.start, w.stop, w.stop - w.first_scored] for w in windows]
        assert as_published == case["windows_begin_end_trglen"]
        scored = [
            Scored(0, np.array([nll(t, t - w.start) for t in range(max(w.first_scored, w.start + 1), w.stop)]), 0, 1, 1)
            for w in windows
        ]
        result = length_result(case["L"], scored, 1)
        assert result.tokens_scored == case["scored_tokens"]
        assert result.perplexity == pytest.approx(case["ppl_token_weighted"], rel=1e-10)
        assert result.perplexity_window_mean == pytest.approx(case["ppl_mean_of_window_means"], rel=1e-10)


@given(tokens=st.integers(2, 400), length=st.integers(2, 400), stride=st.integers(1, 50))
def test_sliding_scores_every_token_once(tokens: int, length: int, stride: int) -> None:
    stride = min(stride, length)
    windows = protocols.sliding(tokens, length, stride)
    scored = [t for w in windows for t in range(w.first_scored, w.stop)]
    assert scored == list(range(tokens))
    assert all(w.stop - w.start <= length for w in windows)


@given(tokens=st.integers(2, 400), length=st.integers(2, 100))
def test_disjoint_windows_are_whole_and_do_not_overlap(tokens: int, length: int) -> None:
    windows = protocols.disjoint(tokens, length)
    assert len(windows) == tokens // length
    assert [t for w in windows for t in range(w.first_scored, w.stop)] == list(range(len(windows) * length))


@given(tokens=st.integers(64, 400), stride=st.integers(1, 80))
def test_tail_scores_the_same_tokens_at_every_length(tokens: int, stride: int) -> None:
    by_length = {
        length: [(w.first_scored, w.stop) for w in protocols.tail(tokens, length, 8, 64, stride)]
        for length in (16, 32, 64)
    }
    assert by_length[16] == by_length[32] == by_length[64]
    assert len(by_length[64]) == (tokens - 64) // stride + 1
    assert all(w.stop - w.start == 32 for w in protocols.tail(tokens, 32, 8, 64, stride))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        documents = [Scored(d, generator.normal(2.0, 0.5, 64) + generator.normal(0, 0.2), 0, 64, 9) for d in range(30)]
        found = length_result(64, documents, 30).interval
        assert found is not None
        assert found.kind == "documents"
        covered += found.low <= math.exp(2.0) <= found.high
    assert 175 <= covered <= 200, covered


def test_one_document_gets_an_interval_over_its_quarters_and_a_short_one_none() -> None:
    nll = np.random.default_rng(0).normal(2.0, 0.5, 6400)
    found = length_result(6400, [Scored(0, nll, 0, 1, 1)], 1).interval
    means = nll.reshape(4, 1600).mean(1)
    half = 3.182446 * means.std(ddof=1) / 2  # Student's t of three degrees of freedom
    assert found is not None
    assert found.kind == "quarters"
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((means.mean() - half, means.mean() + half))
    assert length_result(100, [Scored(0, np.ones(100), 0, 1, 1)], 1).interval is None


def test_buckets_double_and_count_every_token() -> None:
    buckets = position_buckets([Scored(0, np.arange(1.0, 300.0), 1, 1, 1), Scored(0, np.ones(5), 0, 1, 1)])
    assert [(b.start, b.stop) for b in buckets] == [(0, 16), (16, 32), (32, 64), (64, 128), (128, 256), (256, 512)]
    assert sum(b.tokens for b in buckets) == 299 + 5
    assert buckets[1].nll_mean == pytest.approx(np.arange(16, 32).mean())


def harness_windows(tokens: int, length: int) -> list[tuple[list[int], list[int]]]:
    """(inputs, predicted) token places, 0 the prefix: `get_rolling_token_windows` of lm-evaluation-harness with a
    context of one token, then `make_disjoint_window`, as their docstrings describe them."""
    places = list(range(tokens))
    found, done = [], 0
    while done < tokens - 1:
        count = min(length, tokens - 1 - done)
        predicted = places[done + 1 : done + 1 + count]
        inputs = places[: done + count][-length:]
        found.append((inputs, predicted))
        done += count
    return found


@given(tokens=st.integers(1, 300), length=st.integers(2, 100))
def test_rolling_is_the_windows_of_the_harness(tokens: int, length: int) -> None:
    windows = protocols.rolling(tokens, length)
    as_theirs = [(list(range(w.start, w.stop - 1)), list(range(w.first_scored, w.stop))) for w in windows]
    assert as_theirs == harness_windows(tokens, length)


def windows_of(*nll: np.ndarray) -> list[Scored]:
    return [Scored(document, values, 0, 1, 1) for document, values in enumerate(nll)]


@pytest.mark.parametrize("tokens", [1, 64, 100, 6400, 64 * 256, 64 * 256 + 1, 100_000])
def test_groups_of_one_document_are_few_equal_blocks_that_sum_to_all(tokens: int) -> None:
    nll = np.random.default_rng(0).normal(2.0, 0.5, tokens)
    groups = groups_of(windows_of(nll), 1)
    sizes = [count for _, count in groups]
    assert len(groups) <= 256
    assert sizes[0] % 64 == 0 or len(sizes) == 1
    assert set(sizes[:-1]) <= {sizes[0]}
    assert sum(sizes) == tokens
    assert sum(total for total, _ in groups) == pytest.approx(nll.sum())
    assert [total for total, _ in groups] == pytest.approx(
        [part.sum() for part in np.split(nll, np.cumsum(sizes)[:-1])]
    )


def test_groups_of_several_documents_are_the_documents() -> None:
    windows = windows_of(np.ones(3), np.full(5, 2.0))
    assert groups_of([*windows, Scored(0, np.full(2, 4.0), 0, 1, 1)], 3) == [(11.0, 5), (10.0, 5), (0.0, 0)]


def test_the_pieces_of_one_document_are_its_quarters() -> None:
    """A last block may be shorter, blocks may have no token that counts, and few blocks stay as they are."""
    nll = np.random.default_rng(0).normal(2.0, 0.5, 64 * 301 + 5)
    groups = groups_of(windows_of(nll), 1)
    quarters = pieces_of(groups, 1)
    assert len(groups) == 151
    assert [tokens for _, tokens in quarters] == [38 * 128, 38 * 128, 38 * 128, 36 * 128 + 64 + 5]
    edges = np.cumsum([0, *(tokens for _, tokens in quarters)])
    assert [total for total, _ in quarters] == pytest.approx([nll[a:b].sum() for a, b in pairwise(edges)])
    assert pieces_of([(1.0, 64), (0.0, 0), *[(2.0, 64)] * 7], 1) == [(3.0, 128), *[(4.0, 128)] * 3]
    assert pieces_of([(1.0, 64), (0.0, 0), (2.0, 64), (3.0, 9)], 1) == [(1.0, 64), (2.0, 64), (3.0, 9)]
    assert pieces_of([(1.0, 64)] * 5, 1) == [(2.0, 128), (2.0, 128), (1.0, 64)]
    assert pieces_of([(1.0, 64), (0.0, 0), *[(2.0, 64)] * 7], 9) == [(1.0, 64), *[(2.0, 64)] * 7], "documents"


def test_a_paired_comparison_sees_what_two_intervals_cannot() -> None:
    generator = np.random.default_rng(0)
    hard = generator.normal(2.0, 0.5, 40)
    a, b = ([(float(64 * nll), 64) for nll in values] for values in (hard, hard + generator.normal(0.02, 0.05, 40)))
    apart = interval_of(a, 40), interval_of(b, 40)
    assert apart[0] is not None
    assert apart[1] is not None
    assert apart[0].high > apart[1].low, "the intervals overlap"
    probability = paired_probability(a, b)
    assert probability is not None
    assert probability > 0.95
    assert paired_probability(b, a) == pytest.approx(1 - probability)
    assert paired_probability(a, b) == probability, "the same every time"
    assert surely_apart(a, b, 1.0)
    assert surely_apart(b, a, 1.0)
    assert surely_apart(a, b, 1.1), "surely within 10 %"
    assert not surely_apart(b, a, math.exp(0.02))


def test_a_paired_comparison_of_equals_and_of_too_little() -> None:
    pieces = [(1.0, 2), (3.0, 2), (2.0, 2)]
    assert paired_probability(pieces, pieces) == 0.5
    assert paired_probability(pieces[1:], pieces[1:]) is None
    assert not surely_apart(pieces[1:], pieces[1:], 2.0)
    with pytest.raises(ValueError, match="same tokens"):
        paired_probability(pieces, [(1.0, 2), (3.0, 3), (2.0, 2)])


def test_a_paired_comparison_is_right_about_as_often_as_it_says() -> None:
    """Without a difference, the probability is spread evenly."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(300):
        nll = generator.normal(2.0, 0.3, (2, 50))
        found.append(paired_probability(*([(float(value), 1) for value in row] for row in nll)))
    assert 0.42 < np.mean(found) < 0.58
    assert 0.05 < np.mean(np.array(found) > 0.9) < 0.16


SPACED = st.text(st.sampled_from(list("ab é東🙂 \n\t\u3000.")), min_size=1, max_size=60)


@given(text=SPACED, cuts=st.lists(st.integers(0, 100), max_size=5))
def test_bytes_and_words_of_ranges_sum_to_the_harness_counts(text: str, cuts: list[int]) -> None:
    """Of texts, and of token ids wherever no cut goes through a character of white space."""
    document = from_text("d", text, TOKENIZER)
    tokens = len(document.token_ids)
    edges = sorted({0, *(min(cut, tokens) for cut in cuts), tokens})
    words, size = len(re.split(r"\s+", text)), len(text.encode())
    given_ids = from_token_ids("d", document.token_ids, TOKENIZER)
    for read in (document, given_ids, document.after(0), given_ids.after(0)):
        shift = len(read.token_ids) - tokens
        ranges = list(pairwise([0, *(edge + shift for edge in edges[1:])]))
        assert sum(read.bytes_between(*part) for part in ranges) == read.total_bytes == size
        if read.byte_ends is not None or "\u3000" not in text:
            assert sum(read.words_between(*part) for part in ranges) == words
        assert read.words_between(0, shift + tokens) == words


def test_a_word_counts_where_the_space_after_it_begins() -> None:
    document = from_text("d", "ab cd", TOKENIZER)
    ends = document.byte_ends
    assert ends is not None
    assert ends[-1] == 5
    for last in range(1, len(ends)):
        assert document.words_between(0, last) == (1 if ends[last - 1] > 2 else 0)
    assert document.words_between(0, len(ends)) == 2
    assert document.words_between(1, 1) == 0


@pytest.mark.parametrize("name", ["stories260K", "llama3-1m-atto"])
def test_real_tokenizers_lose_no_byte_and_no_word(shared: Path, name: str) -> None:
    """One of them drops the space before a range that is decoded alone."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "models" / name)
    text = (
        "\n " + (shared / "data" / "corpora" / "tinystories.txt").read_text(encoding="utf-8")[:1200] + " naïve 東京 \n"
    )
    known = from_text("d", text, tokenizer)
    decoded = from_token_ids("d", known.token_ids, tokenizer)
    parts = list(pairwise([*range(0, len(known.token_ids), 7), len(known.token_ids)]))
    for document in (known, decoded):
        assert sum(document.bytes_between(*part) for part in parts) == document.total_bytes == len(text.encode())
        assert sum(document.words_between(*part) for part in parts) == len(re.split(r"\s+", text))


def test_word_and_byte_perplexity_are_the_sum_over_words_and_bytes() -> None:
    windows = [Scored(0, np.full(10, 0.5), 0, 20, 4), Scored(0, np.full(6, 1.0), 0, 12, 3)]
    result = length_result(16, windows, 1)
    assert (result.bytes_scored, result.words_scored) == (32, 7)
    assert result.word_perplexity == pytest.approx(math.exp(11 / 7))
    assert result.byte_perplexity == pytest.approx(math.exp(11 / 32))
    assert result.byte_perplexity == pytest.approx(2**result.bits_per_byte)
    assert length_result(16, [Scored(0, np.ones(2), 0, 3, 0)], 1).word_perplexity is None
