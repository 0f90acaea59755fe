"""Rows of synthetic recall, and the batches that mix them with text."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.models.training.__main__ import DEMO
from service.models.training.corpus import PackedTokens, batch_order
from service.models.training.curriculum import Curriculum, Stage
from service.models.training.recall import IGNORED, TASKS, RecallRows
from service.models.training.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(DEMO / "ropeway-demo")
VOCAB = TOKENIZER.get_vocab_size()
TEXT = np.random.default_rng(0).integers(2, VOCAB, 5000).astype(np.uint16)
SEEDS = st.integers(0, 10_000)


@cache
def rows(context: int = 256, seed: int = 0) -> RecallRows:
    return RecallRows(TEXT, TOKENIZER, context, seed)


def decoded(ids: Any) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


@given(number=SEEDS, context=st.sampled_from([64, 128, 256]))
def test_a_row_fills_its_context_and_follows_from_its_number(number: int, context: int) -> None:
    ids, targets = rows(context).row(number)
    again, _ = rows(context).row(number)
    assert ids.shape == targets.shape == (context,)
    assert (ids == again).all()
    assert ((targets == ids) | (targets == IGNORED)).all()
    assert (ids > 1).all()
    assert (ids < VOCAB).all()
    other, _ = rows(context, seed=1).row(number)
    assert (ids != other).any()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
@given(number=SEEDS, length=st.integers(16, 256))
def test_a_target_is_a_token_that_can_be_known(task: Any, number: int, length: int) -> None:
    """Past the first period, every counted token of a repetition occurred before."""
    ids, counted = task(rows(), np.random.default_rng(number), length)
    assert len(ids) == len(counted)
    if task is RecallRows.repeated_tokens:
        assert all(token in ids[:place] for place, token in enumerate(ids) if counted[place])
    if task is RecallRows.pairs:
        first = counted.index(True)
        assert set(ids[first:]) <= set(ids[:first])


@given(number=SEEDS)
def test_repeated_text_occurs_twice(number: int) -> None:
    ids, _ = RecallRows.repeated_text(rows(), np.random.default_rng(number), 128)
    size = next(size for size in range(4, len(ids)) if ids[:size] == ids[-size:])
    assert size >= 4


@given(number=SEEDS)
def test_a_hidden_value_is_in_the_text_and_again_in_the_answer(number: int) -> None:
    ids, counted = RecallRows.hidden(rows(), np.random.default_rng(number), 200)
    said = [token for token, counts in zip(ids, counted, strict=True) if not counts]
    question = decoded(ids).rsplit("\n", 1)[1]
    value = question.removesuffix(".").split(" is ")[-1].split(": ")[-1]
    assert value.strip() in decoded(said)


def test_every_task_has_a_share_of_the_rows() -> None:
    """Rows differ, and each has many counted targets."""
    every = [rows().row(number) for number in range(50)]
    assert len(Counter(tuple(ids) for ids, _ in every)) == 50
    assert np.mean([(targets != IGNORED).mean() for _, targets in every]) > 0.5


def test_stages_follow_one_another_with_their_shares(tmp_path: Path) -> None:
    TEXT.tofile(tmp_path / "train.bin")
    stages = (Stage(0.25, 64, recall=0.75), Stage(0.75, 256, recall=0.5))
    curriculum = Curriculum(tmp_path / "train.bin", TOKENIZER, stages, 1024, steps=8, seed=3)
    shapes = [tuple(curriculum.batch(step)[0].shape) for step in range(8)]
    assert shapes == [(16, 64)] * 2 + [(4, 256)] * 6
    text = PackedTokens(tmp_path / "train.bin", 0, 256)
    inputs, targets = curriculum.batch(5)
    expected, _ = text.rows(batch_order(len(text), 2, 5, 3))
    assert torch.equal(inputs[:2], expected)
    assert (inputs[:, 0] == 0).all()
    counted = targets[:, :-1] != IGNORED
    assert torch.equal(inputs[:, 1:][counted], targets[:, :-1][counted])
    recalled = [curriculum.batch(step)[1][2:] for step in (5, 6)]
    assert not torch.equal(*recalled)
