"""Schemas of Pydantic's models on every route: closed, in one line on request, and refused by paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field, SecretStr

from tests.service.openai.conftest import answer
from tests.service.openai.parrot import tool

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]


class Rope(BaseModel):
    fibre: Literal["hemp", "nylon"]
    metres: Annotated[int, Field(ge=1, le=9)]


class Locker(BaseModel):
    """No field here says ``additionalProperties``."""

    kind: Literal["bowline", "hitch"]
    is_wet: bool
    ropes: Annotated[list[Rope], Field(max_length=2)]
    code: SecretStr
    folder: Path
    spare: Rope | None = None


SCHEMA = Locker.model_json_schema()


def biased(http: httpx.Client) -> dict[str, int]:
    """Texts end at once, and objects go on as long as they may."""
    tokens = [http.post("/tokenize", json={"prompt": f"a{mark}"}).json()["tokens"][-1] for mark in '",']
    return {str(tokens[0]): 100, str(tokens[1]): 90}


def is_exact(text: str) -> bool:
    """True if ``text`` is a locker, with no further keys in any object."""
    return isinstance(Locker.model_validate_json(text, extra="forbid"), Locker)


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"messages": ASK, "logit_bias": biased(http), "max_tokens": 400, "temperature": 0, **body}
    choice: dict[str, Any] = answer(http, CHAT, **asked)["choices"][0]
    return choice


def formed(*, strict: bool | None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": strict}}


def test_a_form_without_a_schema_takes_the_default_of_vllm(http: httpx.Client) -> None:
    form = {"choice": ["yes", "no"], "disable_additional_properties": False}
    assert chat(http, structured_outputs=form)["message"]["content"] in ("yes", "no")


class TestObjectsHaveNoFurtherKeys:
    def test_in_chats(self, http: httpx.Client) -> None:
        for strict in (True, None):
            assert is_exact(chat(http, response_format=formed(strict=strict))["message"]["content"])
        loose = chat(http, response_format=formed(strict=False), max_tokens=200)
        assert loose["finish_reason"] == "length", "further keys without an end"

    def test_in_responses(self, http: httpx.Client) -> None:
        form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
        asked = {"input": "x", "text": {"format": form}, "max_output_tokens": 400, "temperature": 0}
        made = answer(http, RESPONSES, **asked, logit_bias=biased(http))
        assert is_exact(made["output"][-1]["content"][0]["text"])
        assert made["text"]["format"]["schema"] == SCHEMA, "as it was sent"

    def test_in_calls_that_must_come(self, parroting: httpx.Client) -> None:
        function: dict[str, Any] = {"name": "stow", "parameters": SCHEMA}
        body: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
        body["chat_template_kwargs"] = {"script": "[says]", "hushed": True}
        made = chat(parroting, **body, tool_choice="required")
        assert is_exact(made["message"]["tool_calls"][0]["function"]["arguments"])
        body["tools"] = [{"type": "function", "function": {"name": "stow", "strict": True}}]
        bare = chat(parroting, **body, tool_choice="required")
        assert json.loads(bare["message"]["tool_calls"][0]["function"]["arguments"]) == {}

    def test_by_the_name_of_vllm_and_in_one_line(self, http: httpx.Client) -> None:
        form = {"json": SCHEMA, "disable_additional_properties": True, "disable_any_whitespace": True}
        text = chat(http, structured_outputs=form)["message"]["content"]
        assert is_exact(text)
        assert text == json.dumps(json.loads(text), ensure_ascii=False)

    def test_any_object_in_one_line(self, http: httpx.Client) -> None:
        form = {"json_object": True, "disable_any_whitespace": True}
        tokens = http.post("/tokenize", json={"prompt": "a}"}).json()["tokens"]
        made = answer(http, CHAT, messages=ASK, structured_outputs=form, logit_bias={str(tokens[-1]): 100})
        assert made["choices"][0]["message"]["content"] == "{}"


TAGS = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
NAMES = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "object", "propertyNames": {}}}}
FORM = "response_format.json_schema.schema"
REGEX = {"structured_outputs": {"regex": "a"}}


def strictly(name: str, **properties: Any) -> dict[str, Any]:
    made = tool(name, **properties)
    return {**made, "function": made["function"] | {"strict": True}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response_format": TAGS}, f"{FORM}: properties.tags.uniqueItems cannot be enforced; leave it out"),
        ({"response_format": NAMES}, f"{FORM}: $defs.A.propertyNames cannot be enforced; leave it out"),
        (
            {"response_format": {"properties": {"a": {"items": {"if": {}, "then": {}}}}}},
            f"{FORM}: properties.a.items.if and properties.a.items.then cannot be enforced; leave them out",
        ),
        (
            {"tools": [tool("a"), tool("b", tags={"uniqueItems": True})], "tool_choice": "required"},
            "tools: the parameters of 'b': properties.tags.uniqueItems cannot be enforced; leave it out",
        ),
        (
            {"tools": [tool("a"), strictly("b", tags={"uniqueItems": True})], **REGEX},
            "tools: the parameters of 'b': properties.tags.uniqueItems cannot be enforced; leave it out",
        ),
        (
            {
                "tools": [tool("a") | {"function": {"name": "a", "parameters": {"type": "array"}, "strict": True}}],
                **REGEX,
            },
            "tools: the arguments of 'a' are no object",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace: only with json or json_object",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties: only with json",
        ),
    ],
    ids=["tags", "names", "two keys", "a tool", "a tool beside a form", "no object", "blanks", "keys"],
)
def test_a_refusal_names_the_place(parroting: httpx.Client, body: dict[str, Any], said: str) -> None:
    if schema := body.get("response_format"):
        body = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    error = parroting.post(CHAT, json={"messages": ASK, **body}).json()["error"]
    assert error["message"] == said
    assert said.startswith(f"{error['param']}: ")
