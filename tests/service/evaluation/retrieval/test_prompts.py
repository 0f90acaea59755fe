"""Prompts of passkey and needle against their rules: text, depth, length, and the order of what is hidden."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import from_text, from_token_ids
from service.evaluation.retrieval.grid import haystack_of
from service.evaluation.retrieval.haystack import FILLER, Haystack, Hidden, with_hidden
from service.evaluation.retrieval.plan import QUESTION, TASK, needle_drafts, passkey_drafts
from service.evaluation.retrieval.prompts import PromptTokenizer, _longest
from service.evaluation.retrieval.request import NeedleRequest, PasskeyRequest
from tests.service.evaluation.prompting import ESSAY, PROMPTS, TOKENIZER, decoded

PUBLISHED = Haystack(FILLER, between=" ")
DEPTHS = st.floats(0, 1).map(lambda depth: round(depth, 3))


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


class Words:
    """A tokenizer with a token for each word; neighbours that it does not know are one unknown token together."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        known = [1 + "abc".find(word) for word in text.split()]
        return {"input_ids": [token for before, token in pairwise([1, *known]) if before or token]}


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [("a b", " c a", [3, 1]), ("a x", " b", [2]), ("a x", " y", [0]), ("x", " y b", [2])],
)
def test_an_answer_has_tokens_where_the_prompt_takes_its_first(prompt: str, answer: str, expected: list[int]) -> None:
    assert PromptTokenizer(Words(), None).answer_ids(prompt, answer) == expected


@given(
    pieces=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    fixed=st.integers(1, 30),
    room=st.integers(0, 400),
)
def test_prompts_have_as_much_filler_as_fits(pieces: list[int], fixed: int, room: int) -> None:
    """Pieces of these tokens follow one another; of those that fit, none more does."""

    def ids(count: int) -> list[int]:
        whole, rest = divmod(count, len(pieces))
        return [0] * (fixed + whole * sum(pieces) + sum(pieces[:rest]))

    count, found = _longest(ids, fixed + room)
    assert found == ids(count)
    assert len(ids(count)) <= fixed + room < len(ids(count + 1))
