"""Biases and penalties against transformers' own processors and against the formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from service.engine.request import EngineRequest, SamplingParams
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


def rows(*requests: EngineRequest) -> list[tuple[int, EngineRequest]]:
    return list(enumerate(requests))


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


@pytest.mark.parametrize("sampling", CASES, ids=lambda case: "+".join(case))
def test_one_row_by_the_formulas(sampling: dict[str, Any]) -> None:
    given = logits()
    found = adjusted(given, rows(request(**sampling)))
    assert torch.allclose(found[0].double(), expected(given[0], **sampling), rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, given)
    assert torch.equal(given, logits()), "the given logits stay for log-probabilities"


@pytest.mark.parametrize("penalty", [0.8, 1.2, 2.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    given = logits(seed=2)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + ANSWER]), given.clone())
    assert torch.equal(adjusted(given, rows(request(repetition_penalty=penalty))), theirs)


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
    together = adjusted(given, rows(request(), *(request(**case) for case in CASES), request()))
    assert torch.equal(together[0], given[0])
    assert torch.equal(together[-1], given[-1])
    for row, case in enumerate(CASES, 1):
        assert torch.equal(together[row], adjusted(given[row : row + 1], rows(request(**case)))[0])


def test_nothing_is_copied_where_nothing_changes() -> None:
    given = logits(2)
    assert adjusted(given, rows(request(), request(temperature=1.0, top_p=0.5, min_p=0.1))) is given


def test_a_repeated_step_counts_no_token_twice() -> None:
    one = request(presence_penalty=1.0, repetition_penalty=1.1)
    one.before_token(ANSWER)
    one.before_token(ANSWER)
    assert one.occurrences == {7: 0, 9: 1, 250: 0, 4: 3, 120: 1}


def test_a_stop_token_is_held_back_before_min_tokens() -> None:
    given = torch.tensor([[9.0, 8.0, 1.0]])
    early, late = (request([2] * length, stop_token_ids=(0,), min_tokens=2) for length in (1, 2))
    assert [int(sample(given, [each])) for each in (early, late)] == [1, 0]
    assert early.ends_at == (0,)


def test_log_probabilities_are_those_of_the_model() -> None:
    given, biased = logits(), request(logit_bias=((11, 100.0),), logprobs=1)
    assert int(sample(given, [biased])) == 11
    assert biased.logprobs[0].logprob == pytest.approx(float(given[0].log_softmax(-1)[11]))
    assert biased.logprobs[0].top[0][0] == int(given.argmax())
