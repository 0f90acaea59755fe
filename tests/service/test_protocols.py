"""Windows of the four protocols, against the golden vectors and by their definitions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.evaluation import protocols
from service.evaluation.statistics import Scored, interval, length_result, position_buckets


def nll(token: int, context: int) -> float:
    return 2 + 1.5 / math.sqrt(context + 1) + 0.25 * math.sin(0.7 * token)


def test_sliding_is_the_yarn_protocol(shared: Path) -> None:
    golden = json.loads((shared / "golden" / "ppl_protocols.json").read_text())
    for case in golden["cases"]:
        windows = protocols.sliding(case["D"], case["L"], case["stride"])
        as_published = [[w.start, w.stop, w.stop - w.first_scored] for w in windows]
        assert as_published == case["windows_begin_end_trglen"]
        scored = [
            Scored(0, np.array([nll(t, t - w.start) for t in range(max(w.first_scored, w.start + 1), w.stop)]), 0, 1)
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
        documents = [Scored(d, generator.normal(2.0, 0.5, 64) + generator.normal(0, 0.2), 0, 64) for d in range(30)]
        found = interval(documents)
        assert found is not None
        assert found.kind == "documents"
        covered += found.low <= math.exp(2.0) <= found.high
    assert 175 <= covered <= 200, covered


def test_one_document_gets_an_interval_over_blocks_and_a_short_one_none() -> None:
    generator = np.random.default_rng(0)
    found = interval([Scored(0, generator.normal(2.0, 0.5, 6400), 0, 1)])
    assert found is not None
    assert found.kind == "blocks"
    assert found.low < math.exp(2.0) < found.high
    assert interval([Scored(0, np.ones(100), 0, 1)]) is None


def test_buckets_double_and_count_every_token() -> None:
    buckets = position_buckets([Scored(0, np.arange(1.0, 300.0), 1, 1), Scored(0, np.ones(5), 0, 1)])
    assert [(b.start, b.stop) for b in buckets] == [(0, 16), (16, 32), (32, 64), (64, 128), (128, 256), (256, 512)]
    assert sum(b.tokens for b in buckets) == 299 + 5
    assert buckets[1].nll_mean == pytest.approx(np.arange(16, 32).mean())
