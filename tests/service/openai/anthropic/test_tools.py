"""Tools, reasoning and forms of ``/v1/messages``, by the ``anthropic`` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from service.api.anthropic.output import Blocks
from service.api.anthropic.schemas import MessagesRequest
from service.api.openai.tools.reading import Call, Said
from tests.service.openai.conftest import answer
from tests.service.openai.parrot import KNOT, SHARED

ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]


def tool(chat: dict[str, Any]) -> dict[str, Any]:
    """A tool of chats, as this API has it."""
    named = chat["function"]
    return {"name": named["name"], "description": named["description"], "input_schema": named["parameters"]}


TOOLS: list[Any] = [tool(KNOT), tool(SHARED)]
KNOTS = {"type": "object", "properties": {"knot": {"enum": ["bowline", "hitch"]}}, "required": ["knot"]}


@pytest.fixture
def client(base: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0, _strict_response_validation=True) as client:
        yield client


def asked(script: str, **fields: Any) -> dict[str, Any]:
    extra = {"temperature": 0, "chat_template_kwargs": {"script": script}}
    return {"model": "parrot", "max_tokens": 200, "messages": ASK, "extra_body": extra, **fields}


def shown(found: anthropic.types.Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"id", "parsed_output"}, exclude_none=True) for block in found.content]


THOUGHT = {"type": "thinking", "thinking": "Turns of a rope.", "signature": "unsigned"}
HITCH = {"type": "tool_use", "name": "tie", "input": {"knot": "hitch", "wet": True}}
EXPECTED: list[tuple[str, list[dict[str, Any]], str]] = [
    ("[says]", [{"type": "text", "text": "Three turns."}], "end_turn"),
    ("[calls]", [HITCH], "tool_use"),
    (
        "[both]",
        [
            {"type": "text", "text": "I will count."},
            {"type": "tool_use", "name": "count", "input": {"what": "turns"}},
            {"type": "tool_use", "name": "tie", "input": {"knot": "é"}},
        ],
        "tool_use",
    ),
    ("[thinks]", [THOUGHT, {"type": "text", "text": "\n\nFour."}], "end_turn"),
]


@pytest.mark.parametrize(("script", "content", "reason"), EXPECTED)
def test_an_answer_is_blocks(
    client: anthropic.Anthropic, script: str, content: list[dict[str, Any]], reason: str
) -> None:
    whole = client.messages.create(**asked(script, tools=TOOLS))
    assert (shown(whole), whole.stop_reason) == (content, reason)
    with client.messages.stream(**asked(script, tools=TOOLS)) as stream:
        last = stream.get_final_message()
    assert (shown(last), last.stop_reason) == (content, reason)


def test_a_stream_signs_reasoning_at_its_end(client: anthropic.Anthropic) -> None:
    with client.messages.create(**asked("[thinks]", tools=TOOLS), stream=True) as stream:
        events = [event for event in stream if event.type.startswith("content_block")]
    first, last = events[0], events[next(n for n, event in enumerate(events) if event.type == "content_block_stop") - 1]
    assert (first.content_block.signature, last.delta.signature) == ("", "unsigned")  # type: ignore[union-attr]


def test_inputs_of_calls_can_always_be_written() -> None:
    deep = "[" * 400 + "]" * 400
    blocks = Blocks(lambda kind, **fields: None)
    blocks.add(Said(calls=(Call("tie", '{"knot": "\\ud800 x"}'), Call("tie", f'{{"knot": {deep}}}'))))
    half, nested = blocks.content
    assert half.input == {"knot": "? x"}  # type: ignore[union-attr]
    for block in (half, nested):
        assert block.model_dump_json().encode()


def test_one_call_at_most(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    found = client.messages.create(**asked("[both]", tools=TOOLS, tool_choice=choice))
    assert [block.type for block in found.content] == ["text", "tool_use"]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_named_tool_is_called_once_or_more(parallel: bool) -> None:
    choice: Any = {"type": "tool", "name": "count", "disable_parallel_tool_use": not parallel}
    body = MessagesRequest.model_validate({"messages": ASK, "max_tokens": 4, "tools": TOOLS, "tool_choice": choice})
    assert (body.offer.several, body.offer.must) == (parallel, True)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "count"}])
def test_a_call_must_come(client: anthropic.Anthropic, choice: Any) -> None:
    found = client.messages.create(**asked("[thinks, calls]", tools=TOOLS, tool_choice=choice))
    thought, call = shown(found)
    assert (thought["thinking"], found.stop_reason) == ("Tie!", "tool_use")
    assert call == {"type": "tool_use", "name": "count", "input": {"what": "ropes"}}


def test_a_call_and_its_result_go_back(client: anthropic.Anthropic, parroting: httpx.Client) -> None:
    first = client.messages.create(**asked("[calls]", tools=TOOLS))
    (call,) = first.content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "It holds."}]}
    history = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(
        model="parrot", messages=history, tools=TOOLS, extra_body={"chat_template_kwargs": {"script": "[says]"}}
    )
    function = {"name": "tie", "arguments": json.dumps(call.input)}
    calls = [{"id": call.id, "type": "function", "function": function}]
    chat = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.id, "content": "It holds."},
    ]
    same = answer(
        parroting, "/tokenize", messages=chat, tools=[KNOT, SHARED], chat_template_kwargs={"script": "[says]"}
    )
    assert counted.input_tokens == same["count"]
    assert shown(client.messages.create(**asked("[says]", messages=history, tools=TOOLS))) == EXPECTED[0][1]


def test_thinking_is_switched_off_by_the_template(client: anthropic.Anthropic) -> None:
    def prompt(**fields: Any) -> int:
        return client.messages.count_tokens(model="parrot", messages=ASK, **fields).input_tokens

    left_out, enabled = prompt(), prompt(thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt(thinking={"type": "adaptive"}) == left_out == enabled
    assert prompt(thinking={"type": "disabled"}) > left_out
    assert prompt(output_config={"effort": "high"}) == left_out, "the default, for a template without the variable"
    with pytest.raises(anthropic.BadRequestError, match="does not read the variable"):
        prompt(output_config={"effort": "low"})
    with pytest.raises(anthropic.BadRequestError, match="differs from chat_template_kwargs"):
        prompt(thinking={"type": "disabled"}, extra_body={"chat_template_kwargs": {"enable_thinking": True}})


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": KNOTS}}
    found = client.messages.create(**asked("[fits]", output_config=form))
    (block,) = found.content
    assert block.type == "text"
    assert json.loads(block.text) == {"knot": "hitch"}


@pytest.mark.parametrize("place", ["properties", "items"])
def test_schemas_that_are_nested_too_deeply_are_refused(http: httpx.Client, place: str) -> None:
    """Whatever the depth of the stack at which they are read."""
    begin, end = ('{"properties":{"a":', "}}") if place == "properties" else ('{"items":', "}")
    for depth in (*range(430, 510, 6), *range(930, 1000, 6)):
        schema = begin * depth + "{}" + end * depth
        body = (
            '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": '
            + schema
            + "}]}"
        )
        answer = http.post("/v1/messages/count_tokens", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), (depth, answer.text)
