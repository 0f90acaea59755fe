"""A report has the texts that were sent only where that is asked for."""

from __future__ import annotations

import hashlib
import html
import json
import re
from typing import Any

import pytest

from service.evaluation.documents import DEFAULT_DOCUMENT
from service.reports.html import report_of
from service.reports.texts import without_texts
from tests.service.figures import examples
from tests.service.figures.examples import EVERY, job_of

pytestmark = pytest.mark.usefixtures("undrawn")

CANARY = "Nobody but its owner may read of the violet walrus. " * 40
PLACES: dict[str, dict[str, Any]] = {
    "one text": {"input": CANARY},
    "several": {"input": ["short", CANARY]},
    "a list of one": {"input": [CANARY]},
    "in the parts of a sweep": {"evaluations": [{"evaluation": "perplexity", "input": CANARY}, {"input": [CANARY]}]},
}


def body_on(page: str) -> Any:
    shown = re.search(r"How to reproduce.*?<pre [^>]*>(.*?)</pre>", page, re.DOTALL)
    assert shown
    return json.loads(html.unescape(shown[1]))


@pytest.mark.parametrize("place", PLACES)
def test_no_text_is_in_a_report(place: str) -> None:
    page = report_of(examples.perplexity(), job_of(PLACES[place]))
    assert "walrus" not in page
    assert "--include-text" in page
    assert hashlib.sha256(CANARY.encode()).hexdigest() in page


@pytest.mark.parametrize("place", PLACES)
def test_texts_are_in_it_where_that_is_asked_for(place: str) -> None:
    page = report_of(examples.perplexity(), job_of(PLACES[place]), include_text=True)
    assert body_on(page) == PLACES[place]
    assert "--include-text" not in page


def test_name_length_and_hash_say_which_text_it_was() -> None:
    expected = {
        "name": "input",
        "characters": len(CANARY),
        "bytes": len(CANARY.encode()),
        "sha256": hashlib.sha256(CANARY.encode()).hexdigest(),
    }
    body = {"input": CANARY, "lengths": [256]}
    assert body_on(report_of(examples.perplexity(), job_of(body))) == {"input": expected, "lengths": [256]}
    assert body["input"] == CANARY, "the body itself stays"


def test_token_ids_are_a_text_too() -> None:
    ids = [5, 300, 70_000]
    raw = b"".join(value.to_bytes(8, "little") for value in ids)
    expected = {"name": "input", "tokens": 3, "sha256": hashlib.sha256(raw).hexdigest()}
    assert without_texts({"input": ids}) == {"input": expected}
    assert without_texts({"input": [ids]}) == {"input": [expected]}
    assert [found["name"] for found in without_texts({"input": [ids, ids]})["input"]] == ["input[0]", "input[1]"]


def test_documents_have_their_names() -> None:
    one, two = ["a.txt"], ["a.txt", "b.txt"]
    for given, names in ((["A text.", "B text."], two), ("A text.", one), (["A text."], one)):
        shown = without_texts({"input": given, "names": names})
        described = shown["input"] if isinstance(shown["input"], list) else [shown["input"]]
        assert [document["name"] for document in described] == names
        assert list(shown) == ["input"]


def test_names_of_built_in_documents_stay() -> None:
    body = {"input": DEFAULT_DOCUMENT, "evaluations": [{"input": ["python-reference"]}]}
    assert without_texts(body) == body
    assert "--include-text" not in report_of(examples.perplexity(), job_of(body))


def test_a_text_that_is_no_utf8_has_a_hash() -> None:
    assert without_texts({"input": "\ud800"})["input"]["bytes"] == 3


@pytest.mark.parametrize("evaluation", ["perplexity", "sweep"])
def test_a_long_text_does_not_lengthen_a_report(evaluation: str) -> None:
    lengths = [len(report_of(EVERY[evaluation](), job_of({"input": text}))) for text in ("a", "a" * 60_000)]
    assert lengths[1] - lengths[0] < 50
