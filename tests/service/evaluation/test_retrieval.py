"""Passkey and needle: prompts against their rules, passes against plain transformers, scores against handmade ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from patches import Patched, encode, parse, patched
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import from_text, from_token_ids
from service.evaluation.retrieval.grid import haystack_of
from service.evaluation.retrieval.haystack import FILLER, Haystack, Hidden, with_hidden
from service.evaluation.retrieval.plan import (
    QUESTION,
    TASK,
    DepthPlan,
    needle_drafts,
    passkey_drafts,
    plan_of,
)
from service.evaluation.retrieval.request import NeedleRequest, PasskeyRequest
from service.evaluation.retrieval.results import PasskeyResult
from service.evaluation.retrieval.scores import first_integer, interval, recall
from service.evaluation.retrieval.unit import RetrievalUnit
from service.evaluation.scoring import Reading
from service.evaluation.unit import evaluate, run_units
from service.models.registry import ModelRegistry
from tests.models import tiny_model, tiny_tokens
from tests.service.evaluation.prompting import (
    ESSAY,
    PROMPTS,
    TOKENIZER,
    decoded,
    finish,
    hopeless,
    perfect,
    registry,
    settings_of,
)

PUBLISHED = Haystack(FILLER, between=" ")
DEPTHS = st.floats(0, 1).map(lambda depth: round(depth, 3))


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")


# Prompts


@given(
    depth=DEPTHS,
    digits=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    extra=st.integers(0, 700),
    published=st.booleans(),
)
def test_passkey_prompts(depth: float, digits: int, seed: int, extra: int, published: bool) -> None:
    haystack = PUBLISHED if published else Haystack(re.sub(r"\d+", "some", ESSAY))
    request = PasskeyRequest(depths=[depth], samples=1, seed=seed, digits=digits)
    (draft,) = passkey_drafts(request, haystack, published=published)
    smallest = PROMPTS.smallest(draft)
    sample = PROMPTS.sample(draft, smallest + extra)
    reserved = max(digits + 5, len(sample.answer_ids))
    assert len(sample.prompt_ids) + reserved <= smallest + extra
    assert len(sample.prompt_ids) + reserved > smallest + extra - 40, "a word more would have fitted"

    lines = decoded(sample.prompt_ids)
    assert lines.startswith(TASK + "\n")
    assert lines.endswith("\n" + QUESTION)
    (key,) = draft.expected
    assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", key)
    hidden = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
    assert lines.count(hidden) == 1
    assert TOKENIZER.decode(sample.answer_ids.tolist()) == f" {key}"

    before, after = lines.removeprefix(TASK + "\n").removesuffix("\n" + QUESTION).split(hidden[1:-1])
    words = len(before.split()) + len(after.split())
    assert abs(len(before.split()) - depth * words) <= 0.5
    filler = " ".join([FILLER] * 40 if published else [haystack.text] * 2)
    assert " ".join([*before.split(), *after.split()]) in " ".join(filler.split())
    assert key not in before + after


@given(depth=DEPTHS, seed=st.integers(0, 10_000), extra=st.integers(0, 700))
def test_needle_prompts(depth: float, seed: int, extra: int) -> None:
    request = NeedleRequest(depths=[depth], samples=1, seed=seed)
    (draft,) = needle_drafts(request, Haystack(ESSAY))
    length = PROMPTS.smallest(draft) + extra
    sample = PROMPTS.sample(draft, length)
    assert length - 60 < len(sample.prompt_ids) + max(len(sample.answer_ids), request.max_new_tokens) <= length

    text = decoded(sample.prompt_ids)
    assert text.count(request.needle) == 1
    assert text.endswith(f"\n\n{request.question}")
    before, after = text.removesuffix(f"\n\n{request.question}").split(request.needle)
    assert before == "" or depth == 1 or before.rstrip()[-1] in ".!?"
    words = [*before.split(), *after.split()]
    longest_sentence = max(len(sentence.split()) for sentence in re.split(r"[.!?]", ESSAY))
    assert 0 <= round(depth * len(words)) - len(before.split()) <= longest_sentence
    assert depth not in (0, 1) or len(before.split()) == depth * len(words)
    assert " ".join(words) in " ".join([ESSAY] * 2)
    answer = "eat a sandwich and sit in Dolores Park on a sunny day"
    assert TOKENIZER.decode(sample.answer_ids.tolist()) == f" {answer}"
    assert all(string in answer for string in draft.expected)


def test_prompts_differ_by_sample_and_seed_and_by_nothing_else() -> None:
    def texts(**fields: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        drafts = passkey_drafts(PasskeyRequest(**fields), Haystack(ESSAY), published=False)
        return {draft.name: (draft.text(50), draft.expected) for draft in drafts}

    few, more = texts(depths=[0.5], samples=2), texts(depths=[0.0, 0.5, 0.5], samples=3)
    assert len(more) == 6
    assert few.items() <= more.items()
    assert len(set(more.values())) == 6
    assert texts(depths=[0.5], samples=2) == few
    assert not set(texts(depths=[0.5], samples=2, seed=1).values()) & set(few.values())


def test_a_haystack_shorter_than_the_prompt_starts_over() -> None:
    assert Haystack("One two.\nThree.", between=" ").cut(1, 7) == "two.\nThree. One two.\nThree. One two."
    assert PUBLISHED.cut(19, 38) == f"{FILLER} {FILLER}"
    assert Haystack("a b").cut(0, 0) == ""


def test_sentences_for_the_same_place_stay_in_order() -> None:
    hidden = [Hidden(0.52, "C."), Hidden(0.5, "A."), Hidden(0.51, "B."), Hidden(1.0, "Z.")]
    found = with_hidden(Haystack("One two three. Four five six."), 0, 6, hidden)
    assert found == "One two three. A. B. C. Four five six. Z."


def test_documents_follow_one_another() -> None:
    texts: list[str | list[int]] = ["First.", TOKENIZER("Second.", add_special_tokens=False)["input_ids"]]
    documents = [from_text("a", "First.", TOKENIZER), from_token_ids("b", texts[1], TOKENIZER)]  # type: ignore[arg-type]
    assert haystack_of(texts, documents).cut(0, 2) == "First.\n\nSecond."
    with pytest.raises(InvalidEvaluation, match=r"^input: has no words"):
        haystack_of(["  \n"], [from_text("a", "  \n", TOKENIZER)])


# Scoring


def plain_greedy(folder: Path, ids: list[int], new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([ids])
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new_tokens, pad_token_id=1
    )
    return found[0, len(ids) :].tolist()


def read(
    patch: Patched, request: dict[str, Any], ids: list[int], answer: list[int], new_tokens: int, chunk: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(log-probabilities, ranks, continuation); without an answer the first two are empty."""
    slot = patch.slots.acquire(patch.resolve(parse(request), len(ids) + new_tokens))
    reading = Reading(patch, slot)
    last = finish(reading.prefill(ids, chunk))
    scores = finish(reading.answer(last, answer, chunk)) if answer else None
    assert reading.length == len(ids)
    found = finish(reading.decode(last, new_tokens, ())).tolist()
    patch.slots.release(slot)
    return (np.array([]), np.array([]), found) if scores is None else (scores.logprobs, scores.ranks, found)


@pytest.mark.parametrize("length", [3, 40, 200])
def test_the_continuation_is_that_of_generate(checkpoints: Path, length: int) -> None:
    folder = checkpoints / "tiny"
    ids = [0, *TOKENIZER(ESSAY, add_special_tokens=False)["input_ids"][: length - 1]]
    plain = plain_greedy(folder, ids, 24)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with patched(model) as patch:
        for chunk in (16, 512):
            assert read(patch, {"method": "default"}, ids, [7, 8, 9], 24, chunk)[2] == plain
        reading = Reading(patch, 0)
        last = finish(reading.prefill(ids, 64))
        end = plain[5]
        assert finish(reading.decode(last, 24, (end,))).tolist() == plain[: plain.index(end) + 1]


@pytest.mark.parametrize("answer_tokens", [1, 2, 30])
def test_answers_are_scored_as_by_a_plain_forward(checkpoints: Path, answer_tokens: int) -> None:
    folder = checkpoints / "tiny"
    ids = TOKENIZER(ESSAY)["input_ids"][: 90 + answer_tokens]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, 89:-1].double().log_softmax(-1).numpy()
    targets = np.array(ids[90:])
    expected = logprobs[np.arange(len(targets)), targets]
    with patched(model) as patch:
        for chunk in (16, 64):
            found, ranks, _ = read(patch, {"method": "default"}, ids[:90], ids[90:], 2, chunk)
            np.testing.assert_allclose(found, expected, atol=1e-4)
            assert ranks.tolist() == [1 + int((row > own).sum()) for row, own in zip(logprobs, expected, strict=True)]


REQUESTS = [
    {"method": "default"},
    {"method": "streaming", "sink_tokens": 2, "window": 20},
    {"method": "lm_infinite", "n_global": 4, "n_local": 16},
    {"method": "self_extend", "neighbor_window": 16},
    {"method": "dynamic", "factor": 4.0},
]


@pytest.mark.parametrize("request_fields", REQUESTS, ids=lambda fields: fields["method"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4"])
def test_scoring_an_answer_leaves_no_trace(family: str, request_fields: dict[str, Any]) -> None:
    """Against a forward over everything for every token: no cache, no chunks, nothing evicted."""
    _, model = tiny_model(family)
    ids, answer = tiny_tokens(1, 100)[0].tolist(), tiny_tokens(1, 9, seed=1)[0].tolist()
    with patched(model) as patch:
        slot = patch.slots.acquire(patch.resolve(parse(request_fields), len(ids) + 12))

        def logprobs(sequence: list[int]) -> torch.Tensor:
            positions = encode(torch.arange(len(sequence)), slot)[None]
            with torch.no_grad():
                output = model(input_ids=torch.tensor([sequence]), position_ids=positions, use_cache=False)
            return output.logits[0].double().log_softmax(-1)

        rows = logprobs(ids + answer)[len(ids) - 1 : -1]
        expected = rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()
        found, _, continued = read(patch, request_fields, ids, answer, 12, 32)
        np.testing.assert_allclose(found, expected, atol=2e-4)
        assert len(continued) == 12
        assert logprobs(ids + continued[:-1])[len(ids) - 1 :].argmax(-1).tolist() == continued, "greedy, by induction"
        assert read(patch, request_fields, ids, [], 12, 32)[2] == continued


# Results


def test_scores() -> None:
    assert first_integer(" 4711, and 12", ["4711"]) == 1
    assert first_integer(" not 12 but 4711", ["4711"]) == 0
    assert first_integer(" 47110", ["4711"]) == 0
    assert first_integer(" none", ["4711"]) == 0
    assert recall("a SANDWICH in dolores park", ["sandwich", "Dolores Park", "sunny day", "sit"]) == 0.5
    assert recall("", ["x"]) == 0


def test_intervals() -> None:
    known = interval([1.0] * 8 + [0.0] * 2)  # Wilson's interval of 8 in 10, as in Newcombe (1998)
    assert (known.low, known.high) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert known.kind == "samples"
    assert interval([0.0] * 5).low == 0
    assert interval([1.0] * 5).high == 1
    partial, floor, ceiling = interval([0.25, 0.5]), interval([0, 0]), interval([1, 0])
    assert (partial.low, partial.high) == (floor.low, ceiling.high)


def small(models: ModelRegistry, **fields: Any) -> DepthPlan:
    request = {"lengths": [256, 240], "depths": [0.0, 0.5], "samples": 2, "methods": [{"method": "default"}]}
    return plan_of(PasskeyRequest(**{**request, **fields}), models, settings_of(Path()))


def test_handmade_outcomes(models: ModelRegistry) -> None:
    plan = small(models, methods=[{"method": "default"}, {"method": "linear", "factor": 2}], seed=7)
    assert len(plan.units) == 2 * 2 * 2 * 2
    for outcomes, score, nll in ((perfect(plan), 1.0, 0.0), (hopeless(plan), 0.0, 2.5)):
        result = plan.result(outcomes)
        assert [method.label for method in result.methods] == [subject.label for subject in plan.subjects]
        for method in result.methods:
            assert [(cell.length, cell.depth) for cell in method.cells] == [
                (240, 0.0),
                (240, 0.5),
                (256, 0.0),
                (256, 0.5),
            ]
            assert [at.samples for at in method.lengths] == [4, 4]
            for average in (*method.cells, *method.lengths):
                assert (average.score, average.answer_nll, average.answer_accuracy) == (score, nll, score)
        assert [row["seed"] for row in result.rows()] == [7] * 8
        assert all(set(row) == set(result.rows()[0]) for row in result.rows())
        assert PasskeyResult.model_validate(result.numbers()) == result


def test_one_right_answer_is_counted_where_it_was_given(models: ModelRegistry) -> None:
    plan = small(models)
    outcomes = hopeless(plan)
    outcomes[3] = perfect(plan)[3]  # length 240, depth 0.5, the second sample
    (method,) = plan.result(outcomes).methods
    assert [cell.score for cell in method.cells] == [0, 0.5, 0, 0]
    assert [at.score for at in method.lengths] == [0.25, 0]
    assert method.cells[1].outputs[1].output == f" {method.cells[1].outputs[1].expected[0]}"


def test_the_order_of_units_changes_nothing(models: ModelRegistry) -> None:
    methods = [{"method": "dynamic", "factor": 4}, {"method": "streaming", "window": 32}]
    fields = {"methods": methods, "lengths": [240], "samples": 1}
    plan = small(models, **fields)
    result = finish(evaluate(plan))
    measured = finish(run_units(plan.units[::-1]))[::-1]
    assert plan.result([outcome for outcome, _ in measured]).numbers() == result.numbers()
    assert finish(evaluate(small(models, **fields))).numbers() == result.numbers()
    assert result.methods[0].pe != result.methods[1].pe


def test_progress_reaches_the_promised_tokens(models: ModelRegistry) -> None:
    plan = small(models, lengths=[240])
    unit = plan.units[0]
    assert isinstance(unit, RetrievalUnit)
    first = finish(unit.run())["token_ids"][0]
    early = RetrievalUnit(unit.subject, unit.length, unit.name, unit.sample, (int(first),), unit.chunk)
    assert len(finish(early.run())["token_ids"]) == 1
    for each in (unit, early):
        assert sum(each.run()) == each.tokens  # type: ignore[arg-type]
    assert early.inputs() != unit.inputs()
    assert (
        max(len(u.sample.prompt_ids) + u.sample.new_tokens for u in plan.units if isinstance(u, RetrievalUnit)) <= 240
    )


def test_a_needle_evaluation_as_a_whole(models: ModelRegistry) -> None:
    request = NeedleRequest(
        input=ESSAY,
        needle="The captain's parrot is called Moses.",
        question="The captain's parrot is called",
        expected=["Moses"],
        lengths=[128],
        depths=[0.25],
        samples=2,
        max_new_tokens=4,
    )
    plan = plan_of(request, models, settings_of(Path()))
    assert all("parrot is called Moses." in decoded(sample.prompt_ids) for sample in plan.samples[128])
    assert plan.result(perfect(plan)).methods[0].lengths[0].score == 1
    result = finish(evaluate(plan))
    assert result.documents[0].tokens == len(TOKENIZER(ESSAY, add_special_tokens=False)["input_ids"])
    assert result.methods[0].cells[0].outputs[0].answer_tokens == len(plan.samples[128][0].answer_ids)


# Refusals


def test_too_short_is_refused_with_the_length_that_is_needed(models: ModelRegistry) -> None:
    with pytest.raises(
        InvalidEvaluation, match=r"^lengths: 64 tokens are too few: passkey needs at least \d+$"
    ) as error:
        small(models, lengths=[64, 1024])
    smallest = int(str(error.value).split()[-1])
    assert small(models, lengths=[smallest]).lengths == [smallest]
    with pytest.raises(InvalidEvaluation, match="too few"):
        small(models, lengths=[smallest - 1])


def test_refusals(models: ModelRegistry) -> None:
    with pytest.raises(InvalidEvaluation, match=r"^expected.1: 'Boats' is in the input"):
        needle_drafts(NeedleRequest(expected=["sandwich", "Boats"]), Haystack(ESSAY))
    with pytest.raises(InvalidEvaluation, match=r"^digits: the input is full of numbers"):
        passkey_drafts(PasskeyRequest(digits=1), Haystack("0123456789"), published=False)
    with pytest.raises(InvalidEvaluation, match=r"^lengths: this takes 262144000 tokens"):
        small(models, lengths=[262144], depths=[0.5], samples=1000)
    with pytest.raises(InvalidEvaluation, match=r"^lengths: 300000 is beyond what this server scores"):
        small(models, lengths=[300_000])
    with pytest.raises(InvalidEvaluation, match=r"^methods.0: "):
        small(models, methods=[{"method": "streaming", "sink_tokens": 64}])
    for fields in ({"depths": []}, {"depths": [1.5]}, {"samples": 0}, {"digits": 0}, {"needle": "x"}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            PasskeyRequest(**fields)  # type: ignore[arg-type]


def test_default_lengths(models: ModelRegistry) -> None:
    with pytest.raises(InvalidEvaluation, match="64 tokens are too few"):
        plan_of(PasskeyRequest(), models, settings_of(Path()))
    assert PasskeyRequest().texts() == []
    assert PasskeyRequest(input="Some text.").texts() == ["Some text."]
