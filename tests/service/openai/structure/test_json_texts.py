"""JSON in a body, and JSON in texts inside one: the same defects have the same refusals, by the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from patches import METHODS
from patches.json_text import MOST_LEVELS, MOST_VALUES

JSON = {"Content-Type": "application/json"}
TEXT = "\0text"
"""The place of the text in a body."""

ASK: Any = {"role": "user", "content": "a"}
CALL: Any = {"id": "1", "function": {"name": "f", "arguments": TEXT}}
FUNCTION: Any = {"name": "f", "parameters": TEXT}
FORMAT: Any = {"name": "f", "schema": TEXT}
PLACES: dict[str, tuple[str, Any]] = {
    "structured_outputs.json": ("/generate", {"prompt": "a", "structured_outputs": {"json": TEXT}}),
    "pe": ("/generate", {"prompt": "a", "pe": TEXT}),
    "methods.0": ("/perplexity", {"input": "a", "methods": [TEXT]}),
    "response_format.json_schema.schema": (
        "/v1/chat/completions",
        {"messages": [ASK], "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ),
    "tools.0.function.parameters": (
        "/v1/chat/completions",
        {"messages": [ASK], "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    "messages.1.tool_calls.0.function.arguments": (
        "/v1/chat/completions",
        {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}]},
    ),
    "input.0.arguments": (
        "/v1/responses",
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": TEXT}]},
    ),
    "text.format.schema": (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", **FORMAT}}},
    ),
    "tools.0.input_schema": (
        "/v1/messages",
        {"messages": [ASK], "max_tokens": 4, "tools": [{"name": "f", "input_schema": TEXT}]},
    ),
}

DEFECTS: dict[str, tuple[str, str, str]] = {
    "cut off": ('{"a": ', "", "not valid JSON: Expecting value at character 7"),
    "a long number": (f'{{"a": 1{"0" * 4300}}}', "", "not valid JSON: a number has more than 4300 digits"),
    "twice": ('{"a": 1, "a": 2}', "a", "is given twice in an object"),
    "twice inside": ('{"a": [{}, {"b": 1, "b": 2}]}', "a.1.b", "is given twice in an object"),
    "twice in hidden ones": ('{"a": {"b": 1, "b": 2}, "a": 2}', "a", "is given twice in an object"),
    "half a pair": ('{"a": ["x\\ud83d"]}', "a.0", "character 2 is half a surrogate pair"),
    "half a pair in a key": ('{"a": {"\\udfff": 1}}', "a", "character 1 is half a surrogate pair"),
    "half a pair in a key, twice": ('{"\\udfff": 1, "\\udfff": 1}', "", "character 1 is half a surrogate pair"),
    "levels": (f'{{"a": {"[" * MOST_LEVELS + "]" * MOST_LEVELS}}}', "", "may be nested at most 128 levels deep"),
    "a stack's levels": ('{"a": ' + "[" * 100_000, "", "may be nested at most 128 levels deep"),
    "values": (
        '{"a": [' + "1," * MOST_VALUES + "1]}",
        "",
        f"may hold at most {MOST_VALUES} values; send long documents as text",
    ),
    "strings": ('{"a": [' + '"",' * 70_000 + "1]}", "", "may hold at most 65536 strings"),
    "fields": ('{"a": [' + '{"b":1},' * 17_000 + "1]}", "", "may hold at most 16384 fields of objects"),
}


def refusal(http: httpx.Client, path: str, content: str) -> tuple[int, str, str]:
    reply = http.post(path, content=content, headers=JSON)
    error = reply.json()["error"]
    return reply.status_code, error["param"], error["message"]


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_body_is_refused_by_its_field(http: httpx.Client, defect: str) -> None:
    text, field, message = DEFECTS[defect]
    expected = (400, field if field else "body", f"{field if field else 'body'}: {message}")
    assert refusal(http, "/generate", text) == expected


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_text_in_a_body_is_refused_in_the_same_words(http: httpx.Client, place: str, defect: str) -> None:
    path, body = PLACES[place]
    text, inside, message = DEFECTS[defect]
    field = f"{place}.{inside}" if inside else place
    assert refusal(http, path, json.dumps(body).replace(json.dumps(TEXT), json.dumps(text))) == (
        400,
        field,
        f"{field}: {message}",
    )


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_json_does_not_have_is_refused(http: httpx.Client, place: str, number: str) -> None:
    path, body = PLACES[place]
    text = f'{{"method": "yarn", "factor": {number}}}'
    status, param, message = refusal(http, path, json.dumps(body).replace(json.dumps(TEXT), json.dumps(text)))
    words = "must be a finite number" if place in ("pe", "methods.0") else "holds a number that JSON does not have"
    assert (status, param.removesuffix(".factor")) == (400, place)
    assert words in message


def test_an_input_of_a_call_is_checked_too(http: httpx.Client) -> None:
    block = '{"type": "tool_use", "id": "1", "name": "f", "input": {"a": NaN}}'
    body = f'{{"max_tokens": 4, "messages": [{{"role": "assistant", "content": [{block}]}}]}}'
    field = "messages.0.content.0.input"
    expected = (400, field, f"{field}: holds a number that JSON does not have, such as NaN")
    assert refusal(http, "/v1/messages", body) == expected


def test_values_of_a_short_form_are_read_by_the_same_rules(http: httpx.Client) -> None:
    assert "base" in METHODS["self_extend"].model_fields
    body = {"prompt": "a", "pe": 'self_extend:base={"method": "yarn", "factor": 2, "factor": 4}'}
    expected = (400, "pe.base.factor", "pe.base.factor: is given twice in an object")
    assert refusal(http, "/generate", json.dumps(body)) == expected


def test_levels_within_the_limit_are_read(http: httpx.Client) -> None:
    deep = "[" * (MOST_LEVELS - 1) + "]" * (MOST_LEVELS - 1)
    call = {**CALL, "function": {"name": "f", "arguments": f'{{"a": {deep}}}'}}
    body = {"messages": [ASK, {"role": "assistant", "content": "b", "tool_calls": [call]}, ASK], "max_tokens": 1}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
