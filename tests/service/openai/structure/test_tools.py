"""Calls of tools in chats: what the template is given, answers over a socket, and calls that must come."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from service.api.openai.tools.reading import Call, ForcedReader, PlainReader, Said
from tests.service.openai.conftest import TOO_WIDE, WIDE, answer, chunks
from tests.service.openai.parrot import KNOT, SCRIPTS, TOOLS, tool

PATH = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]


def told(script: str, **body: Any) -> dict[str, Any]:
    return {"messages": ASK, "tools": TOOLS, "chat_template_kwargs": {"script": script}, **body}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = message.get("tool_calls") or []
    assert len({call["id"] for call in found}) == len(found)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


HITCH = ("tie", {"knot": "hitch", "wet": True})
EXPECTED: list[tuple[str, str | None, list[tuple[str, Any]], str | None, str]] = [
    ("[says]", "Three turns.", [], None, "stop"),
    ("[calls]", None, [HITCH], None, "tool_calls"),
    ("[both]", "I will count.", [("count", {"what": "turns"}), ("tie", {"knot": "é"})], None, "tool_calls"),
    ("[thinks]", "\n\nFour.", [], "Turns of a rope.", "stop"),
]


@pytest.mark.parametrize(("script", "content", "calls", "reasoning", "finish_reason"), EXPECTED)
def test_an_answer_is_read(
    parroting: httpx.Client,
    script: str,
    content: str | None,
    calls: list[tuple[str, Any]],
    reasoning: str | None,
    finish_reason: str,
) -> None:
    whole = answer(parroting, PATH, **told(script, logprobs=True, n=2))
    for choice in whole["choices"]:
        message = choice["message"]
        assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
        assert (calls_of(message), choice["finish_reason"]) == (calls, finish_reason)
        assert [token["token"] for token in choice["logprobs"]["content"][:-1]] == SCRIPTS[script]
    deltas = [chunk["choices"][0] for chunk in chunks(parroting, PATH, **told(script))]
    assert "".join(each["delta"].get("content") or "" for each in deltas) == (content or "")
    assert "".join(each["delta"].get("reasoning_content") or "" for each in deltas) == (reasoning or "")
    streamed = [call for each in deltas for call in each["delta"].get("tool_calls", [])]
    assert calls_of({"tool_calls": streamed}) == calls
    assert [call["index"] for call in streamed] == list(range(len(calls)))
    assert deltas[-1]["finish_reason"] == finish_reason


def test_a_tool_may_have_many_parameters(parroting: httpx.Client) -> None:
    many = {"type": "object", "properties": {f"p{n}": {} for n in range(300)}}
    tools = [{"type": "function", "function": {"name": "tie", "parameters": many}}]
    (choice,) = answer(parroting, PATH, **told("[calls]") | {"tools": tools})["choices"]
    assert calls_of(choice["message"]) == [HITCH]


def test_without_tools_nothing_is_read(parroting: httpx.Client) -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        asked = {"messages": ASK, "chat_template_kwargs": {"script": "[calls]"}, **body}
        (choice,) = answer(parroting, PATH, **asked)["choices"]
        assert choice["message"] == {"role": "assistant", "content": "".join(SCRIPTS["[calls]"])}
        assert choice["finish_reason"] == "stop"


def test_an_unreadable_call_is_text(parroting: httpx.Client) -> None:
    (choice,) = answer(parroting, PATH, **told("[stumbles]"))["choices"]
    assert choice["finish_reason"] == "stop"
    assert "'name': tie}" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    (cut,) = answer(parroting, PATH, **told("[breaks off]", max_tokens=3))["choices"]
    assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)
    assert '"argum' in cut["message"]["content"]


def test_one_call_at_most(parroting: httpx.Client) -> None:
    whole = answer(parroting, PATH, **told("[both]", parallel_tool_calls=False))
    (choice,) = whole["choices"]
    assert (calls_of(choice["message"]), choice["finish_reason"]) == ([("count", {"what": "turns"})], "tool_calls")
    assert whole["usage"]["completion_tokens"] == 5, "the answer ends at its first call"
    deltas = [chunk["choices"][0] for chunk in chunks(parroting, PATH, **told("[both]", parallel_tool_calls=False))]
    assert sum(len(each["delta"].get("tool_calls", [])) for each in deltas) == 1


class TestCallsThatMustCome:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_required(self, parroting: httpx.Client, seed: int) -> None:
        body = told("[says]", tool_choice="required", temperature=100.0, seed=seed, max_tokens=1500)
        (choice,) = answer(parroting, PATH, **body)["choices"]
        calls = calls_of(choice["message"])
        assert calls or choice["finish_reason"] == "length"
        for name, arguments in calls:
            right = arguments.get("knot") in ("bowline", "hitch") and isinstance(arguments.get("wet"), bool)
            assert right if name == "tie" else arguments["what"] in ("turns", "ropes")

    @pytest.mark.parametrize("name", ["tie", "count"])
    def test_by_name(self, parroting: httpx.Client, name: str) -> None:
        body = told("[says]", tool_choice={"type": "function", "function": {"name": name}}, seed=1)
        (choice,) = answer(parroting, PATH, **body)["choices"]
        ((found, arguments),) = calls_of(choice["message"])
        assert (found, choice["finish_reason"]) == (name, "tool_calls")
        assert arguments.keys() == ({"knot", "wet"} if name == "tie" else {"what"})
        deltas = [chunk["choices"][0] for chunk in chunks(parroting, PATH, **body)]
        (streamed,) = [call for each in deltas for call in each["delta"].get("tool_calls", [])]
        assert (streamed["function"]["name"], json.loads(streamed["function"]["arguments"])) == (name, arguments)

    def test_one_that_is_cut_off_is_text(self, parroting: httpx.Client) -> None:
        (choice,) = answer(parroting, PATH, **told("[thinks, calls]", tool_choice="required", max_tokens=5))["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].strip() == '[{"name": "count", "arguments": {"what": "ropes"'

    @pytest.mark.parametrize(
        "behind", ["", ",", ", ", "]", ', {"name": "co', ', {"name": "count", "arguments": {"a": []']
    )
    def test_whole_ones_before_a_cut_are_the_answer(self, behind: str) -> None:
        reader = ForcedReader(PlainReader())
        whole = [Call("tie", '{"knot": "é]"}'), Call("count", "{}")]
        raw = ", ".join(f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in whole)
        assert reader.take("[", final=False) == Said()
        assert reader.take(raw + behind, final=True) == Said(calls=tuple(whole))

    @pytest.mark.parametrize("logprobs", [False, True])
    def test_no_chunk_has_empty_content(self, parroting: httpx.Client, logprobs: bool) -> None:
        body = told("[says]", tool_choice="required", parallel_tool_calls=False, seed=1, logprobs=logprobs)
        first, *deltas = [chunk["choices"][0] for chunk in chunks(parroting, PATH, **body)]
        assert first["delta"] == {"role": "assistant", "content": None}
        assert not any("content" in each["delta"] for each in deltas)
        tokens = sum(len(each["logprobs"]["content"]) for each in deltas if each["logprobs"])
        whole = answer(parroting, PATH, **body)
        assert tokens == (whole["usage"]["completion_tokens"] if logprobs else 0)
        assert len(deltas) == 2 + tokens, "the call, and the finish reason"


def test_a_client_goes_through_a_conversation(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        messages: list[Any] = [*ASK]

        def ask(script: str) -> Any:
            extra = {"chat_template_kwargs": {"script": script}}
            found = client.chat.completions.create(model="parrot", messages=messages, tools=TOOLS, extra_body=extra)  # type: ignore[call-overload]
            messages.append(found.choices[0].message)
            return found.choices[0].message

        (call,) = ask("[calls]").tool_calls
        assert json.loads(call.function.arguments) == HITCH[1]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "three"})
        assert ask("[says]").content == "Three turns."


class TestTheTemplate:
    def test_is_given_tools_and_calls(self, parroting: httpx.Client) -> None:
        call = {"id": "a", "type": "function", "function": {"name": "tie", "arguments": '{"wet": false}'}}
        messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "a", "content": "done"})
        body = {"messages": messages, "tools": [KNOT]}
        found = answer(parroting, "/tokenize", **body)["tokens"]
        text = parroting.post("/detokenize", json={"tokens": found}).json()["prompt"]
        shown, *_ = text.split("\nCall as")
        assert json.loads(shown.partition("\n")[2]) == KNOT
        assert (
            '<|im_start|>assistant\n<tool_call>{"name": "tie", "arguments": {"wet": false}}</tool_call><|im_end|>'
            in text
        )
        assert text.endswith("<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n")
        chat = answer(parroting, PATH, **body, max_tokens=1)
        assert chat["usage"]["prompt_tokens"] == len(found)

    def test_that_writes_none_refuses_them(self, http: httpx.Client) -> None:
        error = http.post(PATH, json={"messages": ASK, "tools": TOOLS, "tool_choice": "required"}).json()["error"]
        assert error["message"] == "tools: the chat template of 'tiny' does not write them"

    def test_of_unknown_calls_refuses_auto(self, http: httpx.Client) -> None:
        error = http.post(PATH, json={"messages": ASK, "tools": TOOLS}).json()["error"]
        assert (error["param"], error["code"]) == ("tool_choice", "no_response_template")
        assert "hermes, qwen3_coder, llama3_json" in error["message"]


LONG_NUMBER = f'{{"a": 1{"0" * 4300}}}'

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "must have 1 to 128 char",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a\n"}}]},
        "tools.0.function.name",
        "name: must have 1 to 128 characters: English letters, digits, '_', '.' and '-', not 'a\\n'",
    ),
    ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type", "'function'"),
    ({"tools": [KNOT, KNOT]}, "tools", "two functions have one name"),
    ({"tool_choice": "maybe"}, "tool_choice", "'auto'"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "one of the tools: tie, count"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "none is given"),
    ({"tools": [tool("a", x={"type": "y"})], "tool_choice": "required"}, "tools", "parameters of 'a': Invalid type: y"),
    (
        {"tools": [tool("a", x={"type": "string", "pattern": "("})], "tool_choice": "required"},
        "tools",
        "tools: the parameters of 'a': the expression '(' is refused: unclosed group",
    ),
    ({"tools": [tool("a", x=WIDE)], "tool_choice": "required"}, "tools", f"tools: {TOO_WIDE}"),
    ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "makes the answer"),
    (
        {"tools": [KNOT, tool("b", y={"type": "array", "uniqueItems": True})], "tool_choice": "required"},
        "tools",
        "tools: the parameters of 'b': properties.y.uniqueItems cannot be enforced; leave it out",
    ),
    (
        {"tools": [tool("a", x={"enum": [1, 1234567890123456789]})], "tool_choice": "required"},
        "tools",
        "tools: the parameters of 'a': properties.x.enum.1 would be rounded: have integers within ±9007199254740991",
    ),
    ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages.0.tool_call_id", "role tool"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        "not valid JSON",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": LONG_NUMBER}}]}
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
        "not valid JSON: a number has more than 4300 digits",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_refusals_name_the_field(parroting: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    reply = parroting.post(PATH, json={**told("[says]"), **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "call_0" not in error["message"], "the grammar is not theirs"
