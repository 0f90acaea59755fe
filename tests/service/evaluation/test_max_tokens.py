"""Documents that are cut: to the token, in every evaluation, and said in the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import BUILT_IN, from_text
from service.evaluation.request import DocumentsRequest
from service.evaluation.results import documents_text
from service.evaluation.retrieval.grid import haystack_of
from service.evaluation.unit import Plan, evaluate
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, settings_of

MOST = 150
UNICODE = "Überall größer als 10 € — naïve " * 40

REQUESTS: dict[str, dict[str, Any]] = {
    "perplexity": {"lengths": [64]},
    "long_perplexity": {"lengths": [64]},
    "probe": {"lengths": [64], "distances": [16], "samples": 1},
    "passkey": {"lengths": [256], "depths": [0.5], "samples": 1},
    "needle": {"lengths": [256], "depths": [0.5], "samples": 1, "expected": ["sandwich"]},
    "recommend": {"lengths": [64], "windows": 2},
    "search": {"length": 66, "windows": 1, "held_out": 3, "population": 4, "generations": 1},
    "ruler": {"lengths": [512], "tasks": ["niah_single_2"], "samples": 1},
}


def measured(plan: Plan) -> Any:
    return finish(evaluate(plan))


def planned(models: ModelRegistry, evaluation: str, **fields: Any) -> Any:
    request = EVALUATIONS[evaluation].request.model_validate(REQUESTS.get(evaluation, {}) | fields)
    return plan_of(request, models, settings_of(Path("tiny")))


def test_every_evaluation_of_documents_cuts_them() -> None:
    assert {name for name, found in EVALUATIONS.items() if issubclass(found.request, DocumentsRequest)} == set(REQUESTS)


@pytest.mark.parametrize("evaluation", REQUESTS)
def test_what_is_cut_counts_no_more(models: ModelRegistry, evaluation: str) -> None:
    result = measured(planned(models, evaluation, input=[TEXT, TEXT[:400]], max_tokens=MOST))
    tokenizer = models.default.tokenizer
    whole, short = (len(from_text("a", text, tokenizer).token_ids) for text in (TEXT, TEXT[:400]))
    first, second = result.documents
    assert (first.tokens, first.cut_from) == (MOST, whole)
    assert (second.tokens, second.cut_from) == (short, None)
    assert documents_text(result.documents).startswith(f"2 documents, {MOST + short:,} tokens, 1 cut to {MOST}: ")
    assert documents_text(result.documents[:1]) == f"{first.name} ({MOST} tokens, 1 cut to {MOST})"


@pytest.mark.parametrize("text", [TEXT, UNICODE])
def test_the_numbers_are_those_of_the_first_tokens(models: ModelRegistry, text: str) -> None:
    document = from_text("input", text, models.default.tokenizer)
    cut = measured(planned(models, "perplexity", input=text, max_tokens=MOST))
    alone = measured(planned(models, "perplexity", input=document.token_ids[:MOST]))
    assert [m.lengths[0].nll_sum for m in cut.methods] == [m.lengths[0].nll_sum for m in alone.methods]
    assert cut.documents[0].bytes == document.bytes_between(0, MOST) == document.cut(MOST).total_bytes
    assert document.cut(MOST).words_between(0, MOST) == document.words_between(0, MOST) + 1, "the last word is one too"


@pytest.mark.parametrize("text", [TEXT, UNICODE])
def test_a_haystack_ends_where_its_document_was_cut(models: ModelRegistry, text: str) -> None:
    document = from_text("input", text, models.default.tokenizer)
    for given in (text, document.token_ids):
        haystack = haystack_of([given], [document.cut(MOST)])
        assert text.startswith(haystack.text.rstrip("\ufffd"))
        assert abs(len(haystack.text.encode()) - document.bytes_between(0, MOST)) <= 3, "a character may be cut in two"
    assert haystack_of([text], [document]).text == text


def test_a_built_in_document_is_cut_and_stays_whole_for_others(models: ModelRegistry) -> None:
    name = next(iter(BUILT_IN))
    cut = planned(models, "perplexity", input=name, max_tokens=MOST).documents[0]
    whole = planned(models, "perplexity", input=name).documents[0]
    assert (len(cut.token_ids), cut.cut_from, whole.cut_from) == (MOST, len(whole.token_ids), None)


@pytest.mark.parametrize("evaluation", ["passkey", "ruler"])
def test_it_is_refused_where_there_is_no_document(models: ModelRegistry, evaluation: str) -> None:
    with pytest.raises((InvalidEvaluation, ValidationError), match="max_tokens"):
        planned(models, evaluation, max_tokens=MOST, **({"tasks": ["vt"]} if evaluation == "ruler" else {}))


def test_a_sweep_cuts_in_its_parts(models: ModelRegistry) -> None:
    parts = [{"evaluation": "perplexity", "input": TEXT, "max_tokens": MOST}]
    plan = planned(models, "sweep", evaluations=parts, methods=[{"method": "default"}], lengths=[64])
    assert len(plan.parts[0].documents[0].token_ids) == MOST
    with pytest.raises(ValidationError, match="max_tokens"):
        planned(models, "sweep", evaluations=parts, max_tokens=MOST)
