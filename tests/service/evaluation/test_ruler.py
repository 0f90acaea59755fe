"""RULER's tasks, each solved from its text alone by other code, and their scores."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.retrieval.haystack import FILLER, Haystack
from service.evaluation.retrieval.prompts import Draft
from service.evaluation.retrieval.results import LengthScore
from service.evaluation.ruler import lexicon
from service.evaluation.ruler.plan import RulerPlan, effective_length, plan_of
from service.evaluation.ruler.request import RulerRequest
from service.evaluation.ruler.results import RulerResult, TaskName
from service.evaluation.ruler.tasks import draft_of
from service.evaluation.scores import Interval
from service.evaluation.unit import evaluate, run_units
from service.models.registry import ModelRegistry
from tests.service.evaluation.prompting import (
    ESSAY,
    PROMPTS,
    TOKENIZER,
    decoded,
    finish,
    hopeless,
    perfect,
    settings_of,
)

TASKS: tuple[TaskName, ...] = get_args(TaskName)
DOCUMENTS = Haystack(ESSAY)
SEEDS = st.integers(0, 10_000)
EXTRA = st.integers(0, 900)


def drafted(task: TaskName, seed: int = 0, sample: int = 0, **fields: Any) -> Draft:
    return draft_of(task, sample, RulerRequest(seed=seed, **fields), DOCUMENTS)


def prompt(draft: Draft, extra: int) -> str:
    """The text of a prompt ``extra`` tokens longer than the shortest; it must fit and end where the answer begins."""
    length = PROMPTS.smallest(draft) + extra
    sample = PROMPTS.sample(draft, length)
    assert len(sample.prompt_ids) + max(draft.new_tokens, len(sample.answer_ids)) <= length
    text = decoded(sample.prompt_ids)
    assert text[-1] != " "
    assert TOKENIZER.decode(sample.answer_ids.tolist()) == draft.answer
    assert draft.answer.startswith(" ")
    assert all(string in draft.answer for string in draft.expected)
    return text


# The tasks, solved

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.(?!\S)")
QUERY = re.compile(
    r"What (?:is|are all) the special magic (?:number|uuid)s? for (.+?) mentioned in the provided text\?"
)


@pytest.mark.parametrize(
    ("task", "needles", "asked", "answers"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multikey_2", None, 1, 1),
        ("niah_multikey_3", None, 1, 1),
        ("niah_multivalue", 4, 1, 4),
        ("niah_multiquery", 4, 4, 4),
    ],
)
@settings(max_examples=20)
@given(seed=SEEDS, extra=EXTRA)
def test_needles(task: TaskName, needles: int | None, asked: int, answers: int, seed: int, extra: int) -> None:
    draft = drafted(task, seed)
    text = prompt(draft, extra)
    found = NEEDLE.findall(text)
    assert len(found) == needles or (needles is None and len(found) >= 1 + extra // 150)
    query = QUERY.search(text)
    assert query is not None
    keys = re.split(r", and |, ", query.group(1))
    assert len(keys) == len(set(keys)) == asked
    held = {key: [value for _, other, value in found if other == key] for key in keys}
    assert sorted(value for values in held.values() for value in values) == sorted(draft.expected)
    assert len(draft.expected) == answers
    assert all(text.count(value) == 1 for value in draft.expected)
    assert len({value for _, _, value in found}) == len(found)

    context = text.split("afterwards.\n")[1].rsplit("\nWhat ", 1)[0]
    rest = " ".join(NEEDLE.sub(" ", context).split())
    if needles is None:
        assert rest == ""
    else:
        source = FILLER if task == "niah_single_1" else ESSAY
        assert rest in " ".join([source] * (2 + len(rest) // len(source)))
    is_uuid = task in ("niah_single_3", "niah_multikey_3")
    for kind, key, value in found:
        assert kind == ("uuids" if is_uuid else "numbers")
        assert re.fullmatch(r"[1-9]\d{6}", value) if not is_uuid else uuid.UUID(value).version == 4
        assert uuid.UUID(key).version == 4 if task == "niah_multikey_3" else re.fullmatch(r"[a-z]+-[a-z]+", key)


@given(seed=SEEDS, extra=EXTRA, chains=st.integers(1, 4), hops=st.integers(0, 6))
def test_variable_tracking(seed: int, extra: int, chains: int, hops: int) -> None:
    draft = drafted("vt", seed, vt_chains=chains, vt_hops=hops)
    text = prompt(draft, extra)
    assigned: dict[str, str] = {}
    for name, value in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\S+)$", text, re.MULTILINE):
        assert value.isdigit() or value in assigned, "used before it has a value"
        assert name not in assigned
        assigned[name] = value
    assert len(assigned) == chains * (hops + 1)

    asked = re.search(r"Find all variables that are assigned the value (\d{5}) in", text)
    assert asked is not None
    reached = {asked.group(1)}
    while True:  # the transitive closure of "is assigned"
        more = {name for name, value in assigned.items() if value in reached} - reached
        if not more:
            break
        reached |= more
    assert reached - {asked.group(1)} == set(draft.expected)
    assert f"above, {hops + 1} variables are assigned the value {asked.group(1)}, they are:" in text


@given(seed=SEEDS, extra=EXTRA, frequency=st.integers(2, 12), uncommon=st.integers(1, 3))
def test_common_words(seed: int, extra: int, frequency: int, uncommon: int) -> None:
    frequency = max(frequency, uncommon + 1)
    draft = drafted("cwe", seed, cwe_frequency=frequency, cwe_uncommon_frequency=uncommon)
    text = prompt(draft, extra)
    listed = re.findall(r"(\d+)\. ([a-z]+)", text.split("\n")[1])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == frequency} == set(draft.expected)
    assert {count for word, count in counts.items() if word not in draft.expected} == {uncommon}
    assert len(draft.expected) == 10
    assert len(counts) >= 20
    assert not any(a in b for a in counts for b in counts if a != b)


@given(seed=SEEDS, extra=EXTRA, alpha=st.floats(1.2, 3.0))
def test_frequent_words(seed: int, extra: int, alpha: float) -> None:
    draft = drafted("fwe", seed, fwe_alpha=alpha)
    text = prompt(draft, extra)
    coded = text.split("coded words. ")[1].split("\nQuestion")[0].split()
    counts = Counter(coded)
    ranked = counts.most_common()
    assert ranked[0][0] == "...."
    assert tuple(word for word, _ in ranked[1:4]) == draft.expected
    frequencies = [count for _, count in ranked]
    assert frequencies[1] > frequencies[2] > frequencies[3] > frequencies[4]
    assert frequencies == [int(ranked[0][1] / rank**alpha) for rank in range(1, len(ranked) + 1)]
    assert int(ranked[0][1] / (len(ranked) + 1) ** alpha) == 0
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_as_long_as_they_can_be(task: TaskName) -> None:
    draft = drafted(task)
    reserved = max(draft.new_tokens, len(PROMPTS.answer_ids(draft.text(0), draft.answer)))
    for length in (4000, 4001):
        held = len(PROMPTS.sample(draft, length).prompt_ids)
        piece = 100 if task == "niah_multikey_3" else 70
        assert length - piece < held + reserved <= length


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_decided_by_the_seed_and_the_sample(task: TaskName) -> None:
    draft = drafted(task, seed=3, sample=2)
    again = draft_of(task, 2, RulerRequest(seed=3, samples=9, tasks=[task]), Haystack(ESSAY))
    assert again.text(70) == draft.text(70)  # longer first: what was asked before changes nothing
    assert again.text(11) == draft.text(11)
    assert again.expected == draft.expected
    for other in (drafted(task, seed=4, sample=2), drafted(task, seed=3, sample=1)):
        assert other.text(11) != draft.text(11)
        assert other.expected != draft.expected


def test_new_tokens_are_rulers_unless_capped() -> None:
    assert {task: drafted(task).new_tokens for task in TASKS if task[0] != "n"} == {"vt": 30, "cwe": 120, "fwe": 50}
    assert {drafted(task).new_tokens for task in TASKS if task[0] == "n"} == {128}
    assert [drafted(task, max_new_tokens=40).new_tokens for task in ("niah_single_1", "vt")] == [40, 30]


def test_the_lexicon_has_no_end_and_no_repeats() -> None:
    pairs = len(lexicon.ADJECTIVES) * len(lexicon.NOUNS)
    assert len(set(lexicon.ADJECTIVES)) * len(set(lexicon.NOUNS)) == pairs
    keys = list(islice(lexicon.words(np.random.default_rng(0)), pairs + 10))
    assert len(set(keys)) == len(keys)
    assert Counter(key.count("-") for key in keys) == {1: pairs // 2, 2: pairs + 10 - pairs // 2}
    for draw in (lexicon.syllables, lexicon.coded_words, lexicon.variables, lexicon.numbers, lexicon.uuids):
        items = list(islice(draw(np.random.default_rng(1)), 5000))
        assert len(set(items)) == 5000
        assert len({len(item) for item in items}) == 1
    assert len(set(islice(lexicon.numbers(np.random.default_rng(1), 2), 90))) == 90


# Scores


def small(models: ModelRegistry, **fields: Any) -> RulerPlan:
    request = {
        "tasks": ["vt", "niah_single_2"],
        "input": ESSAY,
        "lengths": [420, 400],
        "samples": 2,
        "max_new_tokens": 8,
    }
    asked = {**request, **fields}
    if not RulerRequest.reads_documents(asked):
        del asked["input"]
    return plan_of(RulerRequest(**asked), models, settings_of(Path()))


def test_handmade_outcomes(models: ModelRegistry) -> None:
    plan = small(models, methods=[{"method": "default"}, {"method": "linear", "factor": 2}])
    for outcomes, score, effective in ((perfect(plan), 1.0, 420), (hopeless(plan), 0.0, None)):
        result = plan.result(outcomes)
        for method in result.methods:
            assert [(at.length, at.task, at.score, at.samples) for at in method.tasks] == [
                (400, "vt", score, 2),
                (400, "niah_single_2", score, 2),
                (420, "vt", score, 2),
                (420, "niah_single_2", score, 2),
            ]
            assert [(at.length, at.score, at.samples) for at in method.lengths] == [(400, score, 4), (420, score, 4)]
            assert method.effective_length == effective
        assert [row["seed"] for row in result.rows()] == [result.seed] * 8
        assert all(set(row) == set(result.rows()[0]) for row in result.rows())
        assert RulerResult.model_validate(result.numbers()) == result
        assert result.parameters == {"vt_chains": 1, "vt_hops": 4}


def test_partial_recall(models: ModelRegistry) -> None:
    plan = small(models, tasks=["vt"], lengths=[400], samples=1)
    (outcome,) = perfect(plan)
    (sample,) = plan.samples[400]
    outcome["token_ids"] = np.array(TOKENIZER(f"{sample.expected[3]} and {sample.expected[0]}.")["input_ids"])
    (at,) = plan.result([outcome]).methods[0].tasks
    assert at.score == 2 / 5
    assert (at.interval.low, at.interval.high) == (0, 1)


def test_effective_length() -> None:
    def of(*scores: float, threshold: float = 0.856) -> int | None:
        none = {"interval": Interval(low=0, high=1, kind="samples"), "answer_nll": 0.0, "answer_accuracy": 0.0}
        lengths = [LengthScore(length=1024 << i, score=score, samples=1, **none) for i, score in enumerate(scores)]  # type: ignore[arg-type]
        return effective_length(lengths, threshold)

    assert of(0.9, 0.86, 0.8) == 2048
    assert of(0.9, 0.856, 0.95) == 1024
    assert of(0.5, 0.99) is None
    assert of(0.9, 0.9) == 2048
    assert of(0.5, 0.99, threshold=0.4) == 2048


def test_the_order_of_units_changes_nothing(models: ModelRegistry) -> None:
    methods = [{"method": "dynamic", "factor": 4}, {"method": "streaming", "window": 32}]
    fields = {"methods": methods, "lengths": [400], "samples": 1}
    plan = small(models, **fields)
    result = finish(evaluate(plan))
    measured = finish(run_units(plan.units[::-1]))[::-1]
    assert plan.result([*measured]).numbers() == result.numbers()
    assert finish(evaluate(small(models, **fields))).numbers() == result.numbers()


# Refusals


def test_too_short_is_refused_with_the_lengths_that_are_needed(models: ModelRegistry) -> None:
    with pytest.raises(InvalidEvaluation, match=r"^lengths: 450 tokens are too few: .*cwe needs at least") as error:
        small(models, tasks=["cwe", "niah_multivalue", "vt"], lengths=[450, 4096])
    needed = dict(re.findall(r"(\w+) needs at least (\d+)", str(error.value)))
    assert "vt" not in needed
    for task, smallest in needed.items():
        assert small(models, tasks=[task], lengths=[int(smallest)]).tasks == [task]
        with pytest.raises(InvalidEvaluation, match="too few"):
            small(models, tasks=[task], lengths=[int(smallest) - 1])


def test_refusals(models: ModelRegistry) -> None:
    with pytest.raises(InvalidEvaluation, match=r"^lengths: this takes \d+ tokens"):
        small(models, tasks=["vt", "vt"], lengths=[262144], samples=1000)
    with pytest.raises(ValueError, match=r"must be below cwe_frequency \(3\)"):
        RulerRequest(cwe_frequency=3)
    for fields in ({"tasks": []}, {"tasks": ["qa_1"]}, {"threshold": 1}, {"fwe_alpha": 1}, {"vt_hops": -1}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            RulerRequest(**fields)  # type: ignore[arg-type]


def test_documents_are_read_only_where_they_are_the_haystack(models: ModelRegistry) -> None:
    assert small(models, tasks=["niah_single_1", "vt"], lengths=[400]).documents == []
    assert [document.name for document in small(models, tasks=["niah_single_2"]).documents] == ["input"]
