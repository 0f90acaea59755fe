"""Forms of answers that clients ask for: beside calls that must come, and with keys of the grammar's library."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.service.openai.conftest import answer
from tests.service.openai.parrot import KNOT, TOOLS, tool

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]
FLAT: list[Any] = [{"type": "function", **each["function"]} for each in TOOLS]
FORM = {"type": "object", "properties": {"turns": {"type": "integer"}}, "required": ["turns"]}
LOOSE = {"lenient": True, "key_separator": "=>"}
HIDDEN: dict[str, Any] = {"x-guidance": LOOSE, **FORM}


@pytest.mark.parametrize("choice", ["required", "tie"])
def test_calls_that_must_come_have_no_text_for_a_form(parroting: httpx.Client, choice: str) -> None:
    """As OpenAI has it: agents send the form of their last answer with each request."""
    named = {"type": "function", "function": {"name": choice}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}
    body = {"messages": ASK, "tools": TOOLS, "response_format": form, "max_tokens": 500, "seed": 1}
    (made,) = answer(parroting, CHAT, **body, tool_choice=choice if choice == "required" else named)["choices"]
    assert made["finish_reason"] == "tool_calls"
    assert made["message"]["tool_calls"]
    flat = choice if choice == "required" else {"type": "function", "name": choice}
    text = {"format": {"type": "json_schema", "name": "a", "schema": FORM}}
    body = {"input": "How many turns?", "tools": FLAT, "text": text, "max_output_tokens": 500, "seed": 1}
    output = answer(parroting, RESPONSES, **body, tool_choice=flat)["output"]
    assert {item["type"] for item in output} <= {"function_call", "reasoning"}
    assert output[-1]["type"] == "function_call"


def test_a_form_is_followed_where_the_model_may_call(parroting: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM | {"additionalProperties": False}}}
    body = {"messages": ASK, "tools": TOOLS, "response_format": form, "max_tokens": 500, "tool_choice": "none"}
    (made,) = answer(parroting, CHAT, **body)["choices"]
    assert list(json.loads(made["message"]["content"])) == ["turns"]


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": HIDDEN}}}, SCHEMA),
        (CHAT, {"structured_outputs": {"json": HIDDEN}}, "structured_outputs.json"),
        (CHAT, {"tools": [KNOT, tool("a") | {"function": {"name": "a", "parameters": HIDDEN}}]}, "tools"),
    ],
)
def test_a_schema_does_not_say_how_it_is_compiled(
    parroting: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    reply = parroting.post(path, json={"messages": ASK, "tool_choice": "required" if "tools" in body else None, **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    own = "the parameters of 'a': " if "tools" in body else ""
    assert error["message"].startswith(f"{param}: {own}the key 'x-guidance' is not supported")


def test_one_of_is_refused_in_plain_words(parroting: httpx.Client) -> None:
    schema = {"oneOf": [{"const": 1}, {"const": 2}]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = parroting.post(CHAT, json={"messages": ASK, "response_format": form}).json()["error"]
    assert error["message"] == f"{SCHEMA}: oneOf is not supported, unless its schemas exclude each other; anyOf is"


@pytest.mark.parametrize("key", ["05", " 5", "5.0", "1_0", "-1", "five"])
def test_a_biased_token_has_one_spelling(parroting: httpx.Client, key: str) -> None:
    reply = parroting.post(CHAT, json={"messages": ASK, "logit_bias": {"7": 1, key: 1}})
    assert reply.status_code == 400
    assert "must be a token id in decimal digits" in reply.json()["error"]["message"]


def test_values_that_ask_for_nothing_pass(parroting: httpx.Client) -> None:
    answer(parroting, CHAT, messages=ASK, verbosity="medium", seed=-(1 << 63), max_tokens=1)
    hint = {"cache_control": {"type": "ephemeral"}}
    hinted = [{"role": "user", "content": [{"type": "text", "text": "x", **hint}], **hint}]
    answer(parroting, CHAT, messages=hinted, tools=[KNOT | hint, {**tool("a"), **hint}], max_tokens=1)
    answer(parroting, RESPONSES, input="x", include=["reasoning.encrypted_content"], max_output_tokens=16)
    for seed, says in (
        (1 << 63, "must be below 9223372036854775808"),
        (-(1 << 63) - 1, "at least -9223372036854775808"),
    ):
        error = parroting.post(CHAT, json={"messages": ASK, "seed": seed}).json()["error"]
        assert (error["param"], says in error["message"]) == ("seed", True)
