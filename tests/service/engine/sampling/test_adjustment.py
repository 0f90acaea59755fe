"""Biases and penalties against transformers' own processors and against the formulas."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given as given_by
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from service.engine.request import EngineRequest, Occurrences, SamplingParams
from service.engine.sampling import sample
from service.engine.sampling.adjustment import adjusted

VOCABULARY = 300
PROMPT = [7, 9, 9, 250]
ANSWER = [4, 9, 4, 4, 120]


def request(answer: list[int] = ANSWER, prompt: list[int] = PROMPT, **sampling: Any) -> EngineRequest:
    """One whose answer has come token by token."""
    made = EngineRequest(prompt, 0, None, 99, SamplingParams(**sampling))
    for length in range(len(answer) + 1):
        made.before_token(answer[:length])
    return made


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)).mul(3)


def expected(row: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """Token by token in float64."""
    changed, params, counts = row.double().clone(), SamplingParams(**sampling), Counter(ANSWER)
    for token, bias in params.logit_bias:
        changed[token] += bias
    for token in {*PROMPT, *ANSWER}:
        factor = params.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token, count in counts.items():
        changed[token] -= params.frequency_penalty * count + params.presence_penalty
    return changed


CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"logit_bias": ((3, 5.0), (9, -100.0))},
    {"repetition_penalty": 1.7, "presence_penalty": -0.4, "frequency_penalty": 0.9, "logit_bias": ((4, 2.5), (8, 1))},
]


def changed(given: torch.Tensor, *requests: EngineRequest) -> torch.Tensor:
    """``given`` as the ``requests`` change it."""
    with adjusted(given, list(enumerate(requests))):
        return given.clone()


@pytest.mark.parametrize("sampling", CASES, ids=lambda case: "+".join(case))
def test_one_row_by_the_formulas(sampling: dict[str, Any]) -> None:
    given = logits()
    found = changed(given, request(**sampling))
    assert torch.allclose(found[0].double(), expected(given[0], **sampling), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, given)
    assert torch.equal(given, logits()), "restored for log-probabilities, in all bits"


def test_a_prompt_may_have_a_token_without_a_logit() -> None:
    """Moshi has one more row of embeddings than logits. Such a prompt ended the generation thread."""
    cases = [{"repetition_penalty": 1.3, "presence_penalty": 0.5}, {"repetition_penalty": 0.5}]
    extended = [request(prompt=[*PROMPT, VOCABULARY], **case) for case in cases]
    given = logits(2)
    assert torch.equal(changed(given, *extended), changed(given, *(request(**case) for case in cases)))


def test_an_error_inside_restores_too() -> None:
    given, held_back = logits(), request([], min_tokens=3, stop_token_ids=(4, 4, 9), logit_bias=((9, 1.0),))
    with suppress(RuntimeError), adjusted(given, [(0, held_back)]):
        assert given[0, 4] == given[0, 9] == -torch.inf
        raise RuntimeError
    assert torch.equal(given, logits())


@pytest.mark.parametrize("penalty", [0.8, 1.2, 2.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    given = logits(seed=2)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + ANSWER]), given.clone())
    assert torch.equal(changed(given, request(repetition_penalty=penalty)), theirs)


@pytest.mark.parametrize("min_p", [1e-4, 0.05, 0.4, 1.0])
def test_min_p_keeps_the_tokens_that_transformers_keeps(min_p: float) -> None:
    given = logits(seed=3)
    kept = MinPLogitsWarper(min_p)(None, given / 1.5)[0].isfinite()
    many = [request(min_p=min_p, temperature=1.5, seed=seed) for seed in range(4000)]
    drawn = torch.bincount(sample(given.expand(len(many), -1), many), minlength=VOCABULARY)
    shares = (given[0] / 1.5).softmax(-1).where(kept, 0.0)
    shares /= shares.sum()
    assert not drawn[~kept].any()
    likely = shares * len(many) > 10
    chi_square = ((drawn - shares * len(many))[likely] ** 2 / (shares * len(many))[likely]).sum()
    assert chi_square < likely.sum() + 4 * (2 * likely.sum()) ** 0.5


def test_rows_of_one_batch_change_each_by_its_own_request() -> None:
    given = logits(len(CASES) + 2)
    together = changed(given, request(), *(request(**case) for case in CASES), request())
    assert torch.equal(together[0], given[0])
    assert torch.equal(together[-1], given[-1])
    for row, case in enumerate(CASES, 1):
        assert torch.equal(together[row], changed(given[row : row + 1], request(**case))[0])


def test_a_repeated_step_counts_no_token_twice() -> None:
    one = request(presence_penalty=1.0, repetition_penalty=1.1)
    one.before_token(ANSWER)
    one.before_token(ANSWER)
    found = dict(zip(one.occurrences.tokens.tolist(), one.occurrences.counts.tolist(), strict=True))
    assert found == {7: 0, 9: 1, 250: 0, 4: 3, 120: 1}


@given_by(st.lists(st.integers(0, 40), max_size=60), st.lists(st.integers(0, 60), max_size=80), st.integers(1, 9))
def test_occurrences_are_counted_in_any_steps(prompt: list[int], answer: list[int], step: int) -> None:
    found = Occurrences(prompt)
    for length in [*range(0, len(answer), step), len(answer)]:
        found.read(answer[:length])
    counts = dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True))
    assert counts == {**dict.fromkeys(prompt, 0), **Counter(answer)}


@pytest.mark.parametrize("kind", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {}], ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf], ids=str)
def test_a_row_without_numbers_leaves_its_neighbours_alone(kind: dict[str, Any], value: float) -> None:
    given = logits(3)
    given[1] = value
    drawn = [request(temperature=1.0, seed=seed, **kind) for seed in range(3)]
    tokens = sample(given, drawn).tolist()
    alone = [int(sample(given[row : row + 1], [request(temperature=1.0, seed=row, **kind)])) for row in (0, 2)]
    assert [tokens[0], tokens[2]] == alone
    assert 0 <= tokens[1] < VOCABULARY


def test_a_stop_token_is_held_back_before_min_tokens() -> None:
    given = torch.tensor([[9.0, 8.0, 1.0]])
    early, late = (request([2] * length, stop_token_ids=(0,), min_tokens=2) for length in (1, 2))
    assert [int(sample(given, [each])) for each in (early, late)] == [1, 0]
    assert early.ends_at == (0,)


WORDS = ((50,), (9, 51), (4, 120, 52), (120, 53), (1, 2, 3, 4, 120, 54), (7, 9, 9, 250, 55))
"""Of these, 51 and the last two do not end behind ``ANSWER``, whatever the prompt."""


def test_the_last_token_of_a_bad_word_may_not_come() -> None:
    given = logits()
    found = changed(given, request(bad_words=WORDS, logit_bias=((50, 100.0),), repetition_penalty=1.2))
    assert found[0].isinf().nonzero()[:, 0].tolist() == [50, 52, 53]
    assert torch.equal(given, logits())
    behind_nothing = changed(given, request([], bad_words=WORDS, min_tokens=1, stop_token_ids=(8,)))
    assert behind_nothing[0].isinf().nonzero()[:, 0].tolist() == [8, 50]
    assert torch.equal(changed(given, request(bad_words=((9, 51),))), given)
    assert SamplingParams(bad_words=WORDS).needs_tokens


def test_only_allowed_tokens_may_come() -> None:
    given, listed = logits(2), request(allowed_token_ids=(3, 50, 8), bad_words=WORDS, logprobs=1)
    found = changed(given, listed, request())
    assert found[0].isfinite().nonzero()[:, 0].tolist() == [3, 8]
    assert torch.equal(found[0, [3, 8]], given[0, [3, 8]])
    assert torch.equal(found[1], given[1])
    assert torch.equal(given, logits(2)), "restored for log-probabilities"


def test_log_probabilities_are_those_of_the_model() -> None:
    given, biased = logits(), request(logit_bias=((11, 100.0),), logprobs=1)
    assert int(sample(given, [biased])) == 11
    assert biased.logprobs[0].logprob == pytest.approx(float(given[0].log_softmax(-1)[11]))
    assert biased.logprobs[0].top[0][0] == int(given.argmax())
