"""Results of passkey and needle: scores of outcomes made by hand, intervals, whole evaluations, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.retrieval.haystack import Haystack
from service.evaluation.retrieval.plan import DepthPlan, needle_drafts, passkey_drafts, plan_of
from service.evaluation.retrieval.request import NeedleRequest, PasskeyRequest
from service.evaluation.retrieval.results import PasskeyResult
from service.evaluation.retrieval.scores import first_integer, interval, recall
from service.evaluation.retrieval.unit import RetrievalUnit
from service.evaluation.unit import evaluate, run_units
from service.models.registry import ModelRegistry
from tests.service.evaluation.prompting import (
    ESSAY,
    TOKENIZER,
    decoded,
    finish,
    hopeless,
    perfect,
    settings_of,
)


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
    outcomes = finish(run_units(plan.units[::-1]))[::-1]
    assert plan.result(outcomes).numbers() == result.numbers()
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
