"""Steps that a card computes late: nothing that the host writes meanwhile reaches them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from patches import parse, patched
from patches.attention.paged import in_place
from service.evaluation.scoring.token_scores import prompt_scores
from tests.card import Card, LateCard, LateUploads, card
from tests.methods import Fields
from tests.models import VOCAB_SIZE, tiny_model
from tests.service.engine.cards.engines import on_card, recorded_on_card
from tests.service.engine.cards.graphs import CAPTURED, LIMITS, TRITON
from tests.service.engine.cards.test_ahead import ENCODINGS, early_steps, ended, generated, requests

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, and tests of its own run on it")

NEW = [20 + 3 * number for number in range(len(ENCODINGS))]
PAGES = replace(LIMITS, page_size=8)


@pytest.fixture(autouse=True)
def _recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_on_card(monkeypatch)


@pytest.fixture(name="ends")
def _ends(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    return early_steps(monkeypatch)


@pytest.mark.parametrize(("family", "kind"), [("gemma3", LateCard), ("llama", LateUploads)])
def test_tokens_are_those_of_steps_at_once(family: str, kind: type[LateCard], ends: Counter[bool]) -> None:
    """Early steps and ordinary ones, past the edges of pages, with every kind of sampling."""
    model = tiny_model(family)[1]
    with patched(model) as patch:
        expected = generated(patch, TRITON, requests(patch, ENCODINGS, NEW), PAGES)
    with on_card(model, kind) as (_, patch):
        found = generated(patch, CAPTURED, requests(patch, ENCODINGS, NEW), PAGES)
    assert found == expected
    assert ends[True] > 5


def test_a_step_in_vain_changes_nothing(ends: Counter[bool]) -> None:
    """One request ends by a token that nobody foresees: the step that was launched for all of them is dropped."""
    limits, (model, encodings) = replace(LIMITS, page_size=32), (tiny_model("llama")[1], ENCODINGS[:3])
    with patched(model) as patch:
        whole = generated(patch, TRITON, requests(patch, encodings, [40] * 3), limits)
        ending = tuple(next(token for token in whole[row][19:] if whole[row].index(token) >= 19) for row in (0, 1))
        expected = ended(patch, TRITON, requests(patch, encodings, [40] * 3, ending), limits)
    with on_card(model, LateCard) as (_, patch):
        assert ended(patch, CAPTURED, requests(patch, encodings, [40] * 3, ending), limits) == expected
    assert sum(len(tokens) < 40 for tokens in expected) >= 2
    assert ends[False] >= 2
    assert ends[True] > 5


def test_a_stream_reads_what_another_had_when_it_waited_for_it() -> None:
    with card(LateCard) as made:
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        states = torch.zeros(3, device="cuda")
        with torch.cuda.stream(one):
            states += 10
        with torch.cuda.stream(other):
            too_soon = states.clone()
            other.synchronize()
            other.wait_stream(one)
            behind = states.clone()
            other.synchronize()
        assert (too_soon.tolist(), behind.tolist()) == ([0.0] * 3, [10.0] * 3)
        assert made.begun(one) == 1


BIASED: list[Fields] = [{"method": "kerple_power"}, {"method": "sandwich"}, {"method": "default"}]
SCORED: list[Fields] = [{"method": "kerple_log"}, {"method": "sandwich", "dim": 64}, {"method": "alibi"}]


def beside_scoring(model: PreTrainedModel, kind: type[Card]) -> tuple[list[list[int]], list[np.ndarray]]:
    """Tokens of requests with tables of biases, and scores of texts under other encodings between their steps."""
    ids = torch.randint(3, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with on_card(model, kind) as (_, patch):
        patch.read_in_place()
        made = requests(patch, BIASED, [40] * len(BIASED))
        for request in made:
            request.noise_seed = 7
        engine = CAPTURED.built(patch, PAGES, lambda *_: None)
        resolved = [patch.resolve(parse(fields), len(ids)) for fields in SCORED]
        work = [prompt_scores(patch, each, ids, 4, top=0, with_next=False) for each in resolved]
        futures = [engine.interleaved.submit(each, lambda _: None, "") for each in work]
        tokens = engine.run_to_end(made)
        return tokens, [future.result(timeout=0).logprobs for future in futures]


def test_scoring_between_steps_comes_behind_them(monkeypatch: pytest.MonkeyPatch, ends: Counter[bool]) -> None:
    """There is room for few tables of biases, so that those of a text take the place of a step's."""
    monkeypatch.setattr(in_place, "LEAST_KEYS", 1)
    monkeypatch.setattr(in_place, "PAGE", 64)
    monkeypatch.setattr("patches.attention.paged.tables.LEAST_DISTANCES", 1 << 12)
    expected, found = (beside_scoring(tiny_model("llama")[1].bfloat16(), kind) for kind in (Card, LateCard))
    assert found[0] == expected[0]
    assert all(np.array_equal(*pair) for pair in zip(found[1], expected[1], strict=True))
    assert ends[True] > 5
