"""Documents shorter than the longest length: refused, or left out with the numbers of the others alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.cli.evaluations import own_fields, separated
from service.cli.shared.measuring import body_of
from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.unit import Plan, evaluate
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, settings_of

SHORT = "A short text."
MIXED = [SHORT, TEXT, SHORT, TEXT[:300], TEXT[500:]]
"""Only the second and the last have 512 tokens. Short ones may repeat: they are left out."""
KEPT = [MIXED[1], MIXED[4]]
BODIES: dict[str, dict[str, Any]] = {
    "perplexity": {"lengths": [64, 512]},
    "long_perplexity": {"lengths": [64, 512]},
    "probe": {"lengths": [64, 512], "distances": [16], "samples": 3, "segment_of": "document"},
    "recommend": {"length": 512, "windows": 2, "methods": [{"method": "default"}]},
    "search": {"length": 512, "windows": 1, "held_out": 3, "population": 4, "generations": 1},
}


def planned(models: ModelRegistry, evaluation: str, **fields: Any) -> Any:
    request = EVALUATIONS[evaluation].request.model_validate(BODIES.get(evaluation, {}) | fields)
    return plan_of(request, models, settings_of(Path("tiny")))


def inputs(plan: Plan) -> list[tuple[int, dict[str, Any]]]:
    return [(unit.length, unit.inputs()) for unit in plan.units]


@pytest.mark.parametrize("evaluation", BODIES)
def test_the_others_are_read_as_if_they_were_alone(models: ModelRegistry, evaluation: str) -> None:
    """Stored units are found again, and tokens of short documents are not counted."""
    with pytest.raises(InvalidEvaluation, match=r"beyond the shortest document, .*; short_documents skip leaves"):
        planned(models, evaluation, input=[TEXT, SHORT])
    alone = planned(models, evaluation, input=KEPT)
    skipping = planned(models, evaluation, input=MIXED, short_documents="skip")
    assert inputs(skipping) == inputs(alone)
    assert skipping.cost == alone.cost
    measured = getattr(skipping, "measured", skipping)
    assert [document.name for document in measured.documents] == ["input[1]", "input[4]"]
    assert [document.name for document in measured.skipped] == ["input[0]", "input[2]", "input[3]"]
    assert measured.documents[1].overlap.document == 0, "the index is among those that are read"


@pytest.mark.parametrize("evaluation", BODIES)
def test_the_result_lists_them(models: ModelRegistry, evaluation: str) -> None:
    says = "Left out as shorter than the longest length: 3 of 5 documents, a, c and d."
    fields = {"recommend": {"lengths": [64], "length": 64}, "search": {"length": 80}}.get(evaluation, {"lengths": [64]})
    given = [SHORT, TEXT, SHORT + SHORT, "No.", TEXT[500:]]
    asked = {"input": given, "names": [*"abcde"], "short_documents": "skip", "distances": [16]}
    if evaluation != "probe":
        asked.pop("distances")
    result = finish(evaluate(planned(models, evaluation, **fields, **asked)))
    assert [document.name for document in result.skipped] == ["a", "c", "d"]
    assert says in result.words()


@pytest.mark.parametrize(
    ("evaluation", "fields", "message"),
    [
        ("perplexity", {"lengths": None}, "short_documents: skip needs lengths: add it"),
        ("recommend", {"length": None}, "short_documents: skip needs length: add it"),
        ("probe", {"input": [SHORT, SHORT * 2]}, "short_documents: skip leaves no document: the longest has"),
        ("probe", {"max_tokens": 100}, "short_documents: skip leaves no document: the longest has 10"),
        ("sweep", {"lengths": [1 << 17]}, "evaluations.0.short_documents: skip leaves no document"),
    ],
)
def test_nothing_to_compare_with_or_to_read_is_refused(
    models: ModelRegistry, evaluation: str, fields: dict[str, Any], message: str
) -> None:
    given = {"input": MIXED, "short_documents": "skip"}
    if evaluation == "sweep":
        given = {"evaluations": [{"evaluation": "perplexity"} | given]}
    with pytest.raises(InvalidEvaluation, match=f"^{re.escape(message)}"):
        planned(models, evaluation, **(given | fields))


@pytest.mark.parametrize(
    ("evaluation", "fields"), [("perplexity", {"protocol": "rolling"}), ("passkey", {"input": MIXED}), ("sweep", {})]
)
def test_it_is_refused_without_effect(models: ModelRegistry, evaluation: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="short_documents"):
        planned(models, evaluation, short_documents="skip", **fields)


@pytest.mark.parametrize("evaluation", ["perplexity", "long_perplexity", "probe"])
def test_a_partial_result_of_fewer_lengths_reads_the_same_documents(models: ModelRegistry, evaluation: str) -> None:
    """At 64 tokens alone, more documents would be long enough, and their units are not finished."""
    body = BODIES[evaluation] | {"input": [TEXT, TEXT[:300]], "short_documents": "skip", "protocol": "tail"}
    if evaluation == "probe":
        del body["protocol"]
    request = EVALUATIONS[evaluation].request.model_validate(body)
    plan = plan_of(request, models, settings_of(Path("tiny")))
    reduced = request.reduced({"lengths": [64]}).reduced({"methods": request.methods})
    part: Any = plan_of(reduced, models, settings_of(Path("tiny")))
    measured = getattr(part, "measured", part)
    assert [document.name for document in measured.documents] == ["input[0]"]
    assert len(part.units) < len(plan.units) or evaluation == "probe"


@pytest.mark.parametrize("evaluation", [*BODIES, "sweep"])
def test_the_shell_has_the_option(evaluation: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    files, own = separated([str(file), "--short-documents", "skip"], own_fields(evaluation))
    if evaluation == "sweep":
        own["evaluations"] = ["perplexity", {"evaluation": "needle", "text": "a", "question": "b", "answer": "c"}]
    body = body_of(evaluation, own, files, None, None, None, None, "http://elsewhere")
    if evaluation != "sweep":
        assert body["short_documents"] == "skip"
        return
    assert "short_documents" not in body
    assert [part.get("short_documents") for part in body["evaluations"]] == ["skip", None]
    assert all(part["input"] == TEXT for part in body["evaluations"])
