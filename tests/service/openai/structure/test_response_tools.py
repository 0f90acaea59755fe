"""Calls of functions and reasoning in ``/v1/responses``, by the ``openai`` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from service.api.openai.responses.items import conversation_of
from service.api.openai.responses.schemas import ResponsesRequest
from tests.service.openai.conftest import answer
from tests.service.openai.parrot import TOOLS

PATH = "/v1/responses"
FLAT: list[Any] = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
CALL = {"type": "function_call", "call_id": "1", "name": "tie", "arguments": "{}"}
HITCH = {"knot": "hitch", "wet": True}


@pytest.fixture
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        yield client


def told(script: str, **fields: Any) -> dict[str, Any]:
    extra = {"chat_template_kwargs": {"script": script}}
    return {"model": "parrot", "input": "How many turns?", "tools": FLAT, "extra_body": extra, **fields}


EXPECTED: list[tuple[str, list[tuple[str, Any]]]] = [
    ("[says]", [("message", "Three turns.")]),
    ("[calls]", [("function_call", HITCH)]),
    ("[both]", [("message", "I will count."), ("function_call", {"what": "turns"}), ("function_call", {"knot": "é"})]),
    ("[thinks]", [("reasoning", "Turns of a rope."), ("message", "\n\nFour.")]),
    ("[stumbles]", [("message", "Well, <tool_call>{'name': tie}</tool_call> ")]),
]


def shown(item: Any) -> tuple[str, Any]:
    assert item.status == "completed"
    if item.type == "function_call":
        return item.type, json.loads(item.arguments)
    return item.type, "".join(part.text for part in item.content)


@pytest.mark.parametrize(("script", "items"), EXPECTED)
def test_items_in_their_order(client: openai.OpenAI, script: str, items: list[tuple[str, Any]]) -> None:
    whole = client.responses.create(**told(script))
    assert [shown(item) for item in whole.output] == items
    assert [tool.name for tool in whole.tools if tool.type == "function"] == ["tie", "count"]
    with client.responses.stream(**told(script)) as stream:  # the package adds the events up, and checks their order
        events = list(stream)
        final = stream.get_final_response()
    assert [shown(item) for item in final.output] == items
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == [kind for kind, _ in items]


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("[says]", "Three turns.<|im_end|>"),
        ("[calls]", ""),
        ("[both]", "I will count. \n"),
        ("[thinks]", "\n\nFour.<|im_end|>"),
        ("[stumbles]", "Well, <tool_call>{'name': tie}</tool_call> <|im_end|>"),
        ("[breaks off]", '<tool_call>  {"name": "tie", "arguments": {"knot": "x"}'),
    ],
)
def test_log_probabilities_are_of_the_text(client: openai.OpenAI, script: str, text: str) -> None:
    asked = told(script, include=["message.output_text.logprobs"])
    if script == "[breaks off]":
        asked["max_output_tokens"] = 4
    whole = client.responses.create(**asked)
    parts = [part for item in whole.output if item.type == "message" for part in item.content]
    found = "".join(token.token for part in parts for token in part.logprobs or [])  # type: ignore[union-attr]
    with client.responses.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert "".join(token.token for event in deltas for token in event.logprobs) == found
    assert found == text


def test_one_call_at_most_and_calls_that_must_come(client: openai.OpenAI) -> None:
    one = client.responses.create(**told("[both]", parallel_tool_calls=False))
    assert [item.type for item in one.output] == ["message", "function_call"]
    assert one.status == "completed"
    forced = client.responses.create(**told("[says]", tool_choice={"type": "function", "name": "count"}))
    *reasoning, call = forced.output
    assert (call.type, call.name) == ("function_call", "count")  # type: ignore[union-attr]
    assert all(item.type == "reasoning" for item in reasoning)
    assert forced.model_dump()["tool_choice"] == {"name": "count", "type": "function"}


def test_a_conversation_goes_back_as_the_client_stores_it(client: openai.OpenAI, parroting: httpx.Client) -> None:
    first = client.responses.create(**told("[calls]"))
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "three"}  # type: ignore[union-attr]
    history = [{"role": "user", "content": "How many turns?"}, *(item.model_dump() for item in first.output), result]
    second = client.responses.create(**told("[says]", input=history))
    assert second.output_text == "Three turns."
    messages = [
        {"role": "user", "content": "How many turns?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call.call_id, "function": {"name": "tie", "arguments": json.dumps(HITCH)}}],  # type: ignore[union-attr]
        },
        {"role": "tool", "content": "three", "tool_call_id": call.call_id},  # type: ignore[union-attr]
    ]
    chat = answer(parroting, "/tokenize", messages=messages, tools=TOOLS, chat_template_kwargs={"script": "[says]"})
    assert second.usage is not None
    assert second.usage.input_tokens == chat["count"]
    counted = client.responses.input_tokens.count(**told("[says]", input=history))
    assert counted.input_tokens == chat["count"]


def test_an_assistants_items_in_a_row_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "id": "s", "summary": [], "content": [{"type": "reasoning_text", "text": "m"}]},
        {"role": "assistant", "content": "So:"},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
        call,
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    found, places = conversation_of(ResponsesRequest.model_validate({"input": items}).input)
    assert [message["role"] for message in found] == ["assistant", "tool", "tool", *["assistant"] * 3]
    assert (found[0]["reasoning_content"], found[0]["content"]) == ("hm", "So:")
    assert [each["id"] for each in found[0]["tool_calls"]] == ["1", "2"]
    assert found[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert [message["content"] for message in found[1:]] == ["x", "y", "", "a", "b"]
    assert places == [2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function", "unknown field"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "tie, count"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input.0.call_id", "required"),
        ({"input": [CALL, {"type": "item_reference", "id": "a"}]}, "input.1.type", "stores no items"),
        ({"input": [{"id": "a"}]}, "input.0.type", "Send the item itself; clients do that with store: false"),
        (
            {"input": [{"type": "mcp_call"}]},
            "input.0.type",
            "message, function_call, function_call_output, reasoning, not 'mcp_call'",
        ),
        ({"input": [{"type": ["message"]}]}, "input.0.type", "must be one of message, function_call"),
        ({"input": ["message"]}, "input.0", "must be an object"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input.0.arguments",
            "not valid JSON",
        ),
    ],
)
def test_refusals_name_the_field(parroting: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    body = {key: value for key, value in told("[says]").items() if key != "extra_body"}
    reply = parroting.post(PATH, json={**body, **change})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert error["message"].count(", not ") <= 1
