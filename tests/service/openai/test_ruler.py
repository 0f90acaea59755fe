"""PUT /generate as RULER's clients send it (NVIDIA/RULER, scripts/pred/client_wrappers.py)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.service.conftest import TEXT
from tests.service.openai.conftest import answer

PROMPT = TEXT[:200]
DRAWING = {"temperature": 0.0, "top_k": 32, "top_p": 1.0, "stop": []}


def put(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """As RULER sends it: JSON as text, the header by hand."""
    reply = http.put("/generate", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_both_dialects_answer_with_the_new_text(http: httpx.Client) -> None:
    expected = answer(http, prompt=PROMPT, temperature=0, max_tokens=20)["choices"][0]["text"]
    assert put(http, {"prompt": PROMPT, "max_tokens": 20, **DRAWING}) == {"text": [expected]}
    sglang = {"text": PROMPT, "sampling_params": {"max_new_tokens": 20, **DRAWING}}
    assert put(http, sglang) == {"text": expected}
    stop = expected[5:8]
    stopped = put(http, {"prompt": PROMPT, "max_tokens": 20, **DRAWING, "stop": [stop]})
    assert stopped == {"text": [expected[: expected.index(stop)]]}


def test_answers_follow_a_form(http: httpx.Client) -> None:
    form: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert put(http, {"prompt": PROMPT, "max_tokens": 20, **DRAWING, **form})["text"][0] in ("yes", "no")
    sampling = {"max_new_tokens": 20, **DRAWING, **form}
    assert put(http, {"text": PROMPT, "sampling_params": sampling})["text"] in ("yes", "no")


def test_an_encoding_can_be_chosen(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, **DRAWING}
    by_alias, by_field = (
        put(http, {**body, "model": "tiny@ntk:8"}),
        put(http, {**body, "pe": {"method": "ntk", "factor": 8}}),
    )
    assert by_alias == by_field != put(http, body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "surprise": 1}, "surprise"),
        ({"text": 4}, "text"),
        ({"text": "a", "prompt": "a"}, "prompt"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"text": "a " * 5000}, "text"),
        ({"text": "a", "sampling_params": {"logit_bias": {"99999": 1}}}, "sampling_params.logit_bias"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 3, "min_tokens": 4}}, "sampling_params.min_tokens"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"text": "a", "sampling_params": {"structured_outputs": {"regex": "("}}},
            "sampling_params.structured_outputs.regex",
        ),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    reply = http.put("/generate", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_junk_is_refused(http: httpx.Client) -> None:
    for junk in ("[]", '"a"', "5", "null"):
        assert http.put("/generate", content=junk, headers={"Content-Type": "application/json"}).status_code == 400
