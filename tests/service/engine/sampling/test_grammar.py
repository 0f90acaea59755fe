"""Grammars in the engine: masks by the library, in all engines, beside other parameters."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import numpy as np
import pytest
import torch

from service.engine.choice import PAGED
from service.engine.request import EngineRequest, Grammar, GrammarFailed, SamplingParams
from service.engine.sampling import sample
from service.engine.sampling.adjustment import adjusted
from tests.grammars import END, letters
from tests.models import VOCAB_SIZE
from tests.service.engine.generating import finished
from tests.service.engine.padded.test_padded import ALONE, TOGETHER, prompt, running, until_idle

EXPRESSION = "(ab|c){2,9}x"


def request(grammar: Grammar, answer: str = "", **sampling: float) -> EngineRequest:
    """One whose answer has come token by token."""
    made = EngineRequest([5, 9], 0, None, 99, SamplingParams(grammar=grammar, **sampling), eos_token_ids=(END,))  # type: ignore[arg-type]
    for length in range(len(answer) + 1):
        made.before_token(list(answer[:length].encode()))
    return made


def allowed(grammar: Grammar, answer: str) -> str:
    """Characters that may follow ``answer``, the end as ``$``."""
    grammar.read(list(answer.encode()))
    return "".join("$" if token == END else chr(token) for token in np.flatnonzero(grammar.allowed(VOCAB_SIZE)))


@pytest.mark.parametrize(
    ("answer", "expected"), [("", "ac"), ("a", "b"), ("ab", "ac"), ("abc", "acx"), ("abcx", "$"), ("c" * 9, "x")]
)
def test_tokens_that_may_follow(answer: str, expected: str) -> None:
    assert allowed(letters(EXPRESSION), answer) == expected


def test_an_end_that_is_text_too_ends_nothing_before_the_grammar_does() -> None:
    grammar = letters("[ab]{2}", ends=(END, ord("b")))
    assert [allowed(grammar, answer) for answer in ("", "a", "aa")] == ["a", "a", "$b"]


def test_a_grammar_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, clock = letters("a*"), iter(range(10))
    monkeypatch.setattr("service.engine.request.grammar.time.thread_time", lambda: next(clock) / 5)
    grammar.allowed(VOCAB_SIZE)
    grammar.read(list(b"a"))
    with pytest.raises(GrammarFailed, match=r"it has taken 0\.40 s for 1 tokens"):
        grammar.allowed(VOCAB_SIZE)


def test_more_tokens_than_logits_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(letters("[a-z]").allowed(VOCAB_SIZE - 10)) == VOCAB_SIZE - 10


def test_a_repeated_step_reads_nothing_twice() -> None:
    made = request(letters("ab?c"), "a")
    for _ in range(3):
        made.before_token(list(b"a"))
        logits = torch.zeros(1, VOCAB_SIZE)
        assert sample(logits, [made]).tolist() == [ord("b")]


def test_rows_of_a_batch_have_each_their_own() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    free = EngineRequest([1], 0, None, 9, SamplingParams())
    rows = [request(letters("a+")), None, request(letters("[x-z]+"), temperature=5.0), free]
    tokens = sample(logits.clone(), rows).tolist()
    assert tokens[0] == ord("a")
    assert chr(tokens[2]) in "xyz"
    assert [tokens[1], tokens[3]] == logits.argmax(-1)[[1, 3]].tolist()


def test_a_bias_within_the_grammar() -> None:
    biased = request(letters("[abc]"))
    object.__setattr__(biased.sampling, "logit_bias", ((ord("b"), 50.0), (ord("z"), 100.0)))
    assert sample(torch.zeros(1, VOCAB_SIZE), [biased]).tolist() == [ord("b")]


def test_a_failure_leaves_other_rows_alone() -> None:
    failing, other = request(letters("ab")), request(letters("ab"), "a")
    failing.before_token(list(b"zz"))
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    assert sample(logits, [failing, other]).tolist() == [int(before[0].argmax()), ord("b")]
    assert isinstance(failing.failure, GrammarFailed)
    assert [failing.is_broken(answer) for answer in ([1, 2], [1, 2, 3])] == [False, True]
    failing.before_token(list(b"zzz"))
    sample(before.clone(), [failing, other])
    assert failing.is_broken([1, 2, 3]), "the first failure counts"
    assert other.failure is None
    assert torch.equal(logits[0], before[0])


def test_log_probabilities_are_those_of_the_model() -> None:
    made = request(letters("ab"), logprobs=2)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    assert sample(logits, [made]).tolist() == [ord("a")]
    assert torch.equal(logits, before)
    assert made.logprobs[0].logprob == pytest.approx(float(before.log_softmax(-1)[0, ord("a")]))
    with suppress(RuntimeError), adjusted(logits, [(0, made)]):
        assert logits.isinf().sum() == VOCAB_SIZE - 1
        raise RuntimeError
    assert torch.equal(logits, before), "restored after an error too"


@pytest.mark.parametrize("choice", [PAGED, TOGETHER, ALONE], ids=str)
async def test_answers_match_in_every_engine(choice: object) -> None:
    samplings = [
        SamplingParams(grammar=letters(EXPRESSION)),
        SamplingParams(grammar=letters("[0-9]{3}-[a-f]{4}"), temperature=1.5, seed=3),
        SamplingParams(grammar=letters(EXPRESSION), temperature=1.5, seed=5, repetition_penalty=1.3, top_p=0.9),
    ]
    async with running(choice, ends=(END,)) as engine:  # type: ignore[arg-type]
        work = [finished(engine, prompt(9 + 5 * n, n), 30, sampling=each) for n, each in enumerate(samplings)]
        free = finished(engine, prompt(12, 7), 30)
        *found, _ = await asyncio.gather(*work, free)
    texts = [bytes(generation.token_ids[:-1]).decode() for generation in found]
    assert all(generation.token_ids[-1] == END for generation in found)
    assert re.fullmatch(EXPRESSION, texts[0])
    assert re.fullmatch("[0-9]{3}-[a-f]{4}", texts[1])
    assert re.fullmatch(EXPRESSION, texts[2])


async def test_an_answer_that_cannot_go_on_ends_alone() -> None:
    async with running(PAGED, ends=(END,)) as engine:
        broken = letters("[0-9]{3}")
        broken.read(list(b"a"))
        samplings = [SamplingParams(grammar=each) for each in (broken, letters("ab"))]
        work = [finished(engine, prompt(9), 30, sampling=each) for each in samplings]
        failed, other = await asyncio.gather(*work, return_exceptions=True)
        assert isinstance(failed, GrammarFailed)
        assert not isinstance(other, BaseException)
        assert bytes(other.token_ids) == b"ab\0"
        await until_idle(engine)
