"""Reasoning in chats: it is read without tools too, and precedes answers by a grammar."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from service.api.openai.tools.reading import Said, TemplateReader
from service.models.grammar_text import Delimiter, among, either, of_calls, of_choices, of_regex, of_schema
from service.models.response_templates import BUILT_IN, LISTINGS, Surroundings, parsing_of, surroundings_of, thinks
from tests.grammars import follows
from tests.service.conftest import tiny_tokenizer
from tests.service.openai.conftest import answer, chunks
from tests.service.openai.parrot import TOOLS

PATH = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]
SCHEMA = {
    "type": "object",
    "properties": {"knot": {"enum": ["bowline", "hitch"]}},
    "required": ["knot"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "knot", "schema": SCHEMA}}


def told(script: str, *, begun: bool = False, **body: Any) -> dict[str, Any]:
    return {"messages": ASK, "chat_template_kwargs": {"script": script, "begun": begun}, **body}


def both(http: httpx.Client, **body: Any) -> tuple[str | None, str | None, list[Any], str]:
    """(content, reasoning, calls, finish reason), the same of a stream."""
    (choice,) = answer(http, PATH, **body)["choices"]
    message = choice["message"]
    deltas = [chunk["choices"][0] for chunk in chunks(http, PATH, **body)]
    for field in ("content", "reasoning_content"):
        assert "".join(each["delta"].get(field) or "" for each in deltas) == (message.get(field) or "")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert [call["function"] for each in deltas for call in each["delta"].get("tool_calls", [])] == calls
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    return message["content"], message.get("reasoning_content"), calls, choice["finish_reason"]


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}], ids=str)
def test_it_is_read(parroting: httpx.Client, tools: dict[str, Any]) -> None:
    assert both(parroting, **told("[thinks]", **tools)) == ("\n\nFour.", "Turns of a rope.", [], "stop")
    goes_on = both(parroting, **told("[goes on]", begun=True, **tools))
    assert goes_on == ('\n{"knot": "bowline"}', "so it is", [], "stop")
    cut = both(parroting, **told("[thinks]", max_tokens=2, **tools))
    assert cut == ("", "Turns of ", [], "length")


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}], ids=["alone", "beside tools"])
@pytest.mark.parametrize(
    ("script", "begun", "content", "reasoning"),
    [
        ("[thinks, fits]", False, '\n\n{"knot":"hitch" }', "Which? { A hitch."),
        ("[goes on]", True, '\n{"knot": "bowline"}', "so it is"),
        ("[fits]", False, '{ "knot" : "hitch" }', None),
    ],
)
def test_it_precedes_an_answer_by_a_schema(
    parroting: httpx.Client, tools: dict[str, Any], script: str, content: str, reasoning: str | None, *, begun: bool
) -> None:
    body = told(script, begun=begun, response_format=FORM, max_tokens=40, **tools)
    assert both(parroting, **body) == (content, reasoning, [], "stop")


def test_a_call_comes_in_place_of_an_answer_by_a_schema(parroting: httpx.Client) -> None:
    content, reasoning, calls, finish_reason = both(parroting, **told("[calls]", response_format=FORM, tools=TOOLS))
    assert (content, reasoning, finish_reason) == (None, None, "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])["knot"]) for call in calls] == [("tie", "hitch")]


def test_it_precedes_calls_that_must_come(parroting: httpx.Client) -> None:
    body = told("[thinks, calls]", tools=TOOLS, tool_choice="required", max_tokens=60)
    content, reasoning, calls, finish_reason = both(parroting, **body)
    assert (content, reasoning, finish_reason) == (None, "Tie!", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("count", {"what": "ropes"})]


def test_responses_have_it_too(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        extra = {"chat_template_kwargs": {"script": "[thinks, fits]"}}
        form: Any = {"format": {"type": "json_schema", "name": "knot", "schema": SCHEMA}}
        found = client.responses.create(model="parrot", input="Which?", text=form, extra_body=extra)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert json.loads(found.output_text) == {"knot": "hitch"}


class TestSurroundings:
    HERMES = "<|im_start|>assistant\n"

    def of(self, name: str, chat: str, prompt: str) -> Surroundings:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template, tokenizer.response_template = chat, BUILT_IN[name]
        return surroundings_of(tokenizer, prompt)

    def test_of_a_model_that_thinks_and_calls(self) -> None:
        thought, call = ("<think>", "</think>"), "<tool_call>"
        assert self.of("hermes", "</think>", self.HERMES) == (thought, False, call, None)
        assert self.of("hermes", "</think>", f"{self.HERMES}<think>\n") == (thought, True, call, None)
        assert self.of("hermes", "</think>", f"{self.HERMES}<think>\n\n</think>\n\n") == (thought, False, call, None)
        assert self.of("hermes", "no thoughts", self.HERMES) == (None, False, call, None)

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("hermes", "<tool_call>"),
            ("qwen3_coder", "<tool_call>"),
            ("mistral", "[TOOL_CALLS]"),
            ("mistral_args", "[TOOL_CALLS]"),
            ("llama3_json", None),
            ("plain", None),
            ("deepseek_r1", None),
        ],
    )
    def test_calls_begin_with_a_text(self, name: str, call: str | None) -> None:
        assert self.of(name, "", "").call == call

    @pytest.mark.parametrize(
        ("call", "begins"),
        [
            ({"open": "<call>"}, "<call>"),
            ({"open": "a.b\nc"}, "a.b"),
            ({"open": ["<a>", "<b>"]}, None),
            ({"open_pattern": "ab*"}, None),
            ({"open_pattern": r"<call>(?P<name>\w+)"}, "<call>"),
            ({"open_pattern": "[ab]"}, None),
        ],
    )
    def test_of_a_template_of_the_checkpoint(self, call: dict[str, Any], begins: str | None) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.response_template = {"start_anchor": ">", "fields": {"content": {}, "tool_calls": call}}
        assert surroundings_of(tokenizer, "").call == begins

    def test_thinking_needs_a_chat_template_that_knows_of_it(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template, tokenizer.response_template = "{{ messages }}", BUILT_IN["hermes"]
        assert not thinks(tokenizer)
        tokenizer.chat_template = "{{ content.split('</think>') }}"
        assert thinks(tokenizer)
        tokenizer.response_template = None
        assert not thinks(tokenizer)
        assert surroundings_of(tokenizer, "") == (None, False, None, None)


THOUGHT, CALL = (Delimiter("<think>"), Delimiter("</think>")), Delimiter("<tool_call>")


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("plain", '[{"name": "tie", "arguments": {"knot": "hitch"}}]', '{"name": "f", "arguments": {}}]'),
        ("llama3_json", '{"name": "tie", "parameters": {"knot": "hitch"}}', '; {"name": "f", "parameters": {}}'),
    ],
)
def test_calls_in_json_follow_their_schemas(name: str, one: str, two: str) -> None:
    schemas = {"tie": SCHEMA, "f": {"type": "object"}}
    several, single = (of_calls(schemas, several=each, listing=LISTINGS[name]) for each in (True, False))
    may = among(either(of_regex("[0-9]{2}"), several), None, None, begun=False)
    more = one.removesuffix("]") + (", " if name == "plain" else "") + two
    for text in (one, more, "42", f"\n{one}"):
        assert follows(may, text), text
    for text in (one.replace("hitch", "bow"), one.replace("tie", "g"), f"{one}42", f"42{one}", "4"):
        assert not follows(may, text), text
    assert follows(among(either(of_regex("[0-9]{2}"), several), THOUGHT, None, begun=True), f"so</think>{one}")
    assert follows(single, one)
    assert not follows(single, more)
    said = read_as(name, more)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("tie", {"knot": "hitch"}), ("f", {})]


def read_as(name: str, text: str) -> Said:
    tokenizer = tiny_tokenizer()
    tokenizer.response_template = BUILT_IN[name]
    return TemplateReader(*parsing_of(tokenizer, "", TOOLS)).take(text, final=True)


FORMS = {
    "schema": (of_schema(SCHEMA), '{"knot": "hitch"}'),
    "regex": (of_regex("[a-f]{2}/"), "ab/"),
    "choice": (of_choices(["yes", "no"]), "no"),
    "calls": (
        of_calls({"f": {"type": "object", "additionalProperties": False}}, several=True),
        '[{"name": "f", "arguments": {}}]',
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_is_found_behind_reasoning(form: str) -> None:
    grammar, right = FORMS[form]
    may = among(grammar, THOUGHT, CALL, begun=False)
    for text in (
        right,
        f"<think>a </th {right} \u00e9</think>\n\n{right}",
        f"\n<think></think>{right}",
        "<tool_call>{x",
        f"<think>a</think><tool_call>{right}",
    ):
        assert follows(may, text), text
    for text in (
        f"a{right}",
        f"{right}a",
        f"<think>{right}",
        f"<think>a</think>b{right}",
        f"</think>{right}",
        f"a<tool_call>{right}",
    ):
        assert not follows(may, text), text
    begun = among(grammar, THOUGHT, None, begun=True)
    assert follows(begun, f"so it is</think>\n{right}")
    assert not follows(begun, right)
    assert not follows(begun, "so</think><tool_call>")
