"""Reasoning in chats: it is read without tools too, and precedes answers by a grammar."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import httpx
import openai
import pytest

from service.models.text.response_templates import BUILT_IN, Thought, thinks, thought_of
from tests.service.conftest import tiny_tokenizer
from tests.service.openai.conftest import answer, chunks
from tests.service.openai.parrot import TOOLS, tool

PATH = "/v1/chat/completions"
ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]
SCHEMA = {
    "type": "object",
    "properties": {"knot": {"enum": ["bowline", "hitch"]}},
    "required": ["knot"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "knot", "schema": SCHEMA}}


def told(script: str, *, begun: bool = False, hushed: bool = False, **body: Any) -> dict[str, Any]:
    return {"messages": ASK, "chat_template_kwargs": {"script": script, "begun": begun, "hushed": hushed}, **body}


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
        ("[thinks, fits]", False, '{"knot":"hitch" }', "Which? { A hitch."),
        ("[goes on]", True, '{"knot": "bowline"}', "so it is"),
        ("[fits]", False, '{ "knot" : "hitch" }', None),
    ],
)
def test_it_precedes_an_answer_by_a_schema(
    parroting: httpx.Client, tools: dict[str, Any], script: str, content: str, reasoning: str | None, *, begun: bool
) -> None:
    body = told(script, begun=begun, response_format=FORM, max_tokens=40, **tools)
    assert both(parroting, **body) == (content, reasoning, [], "stop")


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ("[calls]", [("tie", {"knot": "hitch", "wet": True})]),
        ("[calls twice]", [("count", {"what": "turns"}), ("count", {"what": "ropes"})]),
        ("[thinks, calls on]", [("count", {"what": "ropes"})]),
    ],
)
def test_calls_come_in_place_of_an_answer_by_a_schema(
    parroting: httpx.Client, script: str, calls: list[tuple[str, Any]]
) -> None:
    body = told(script, response_format=FORM, tools=TOOLS, max_tokens=60)
    content, reasoning, found, finish_reason = both(parroting, **body)
    assert (content, finish_reason) == (None, "tool_calls")
    assert reasoning == ("Not <b> now." if "thinks" in script else None)
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == calls


@pytest.mark.parametrize(("strict", "knot"), [(True, "bowline"), (None, "hitch")])
def test_strict_calls_that_the_model_may_make_beside_a_form(
    parroting: httpx.Client, knot: str, *, strict: bool | None
) -> None:
    """The model would tie a hitch."""
    offered = tool("tie", knot={"const": "bowline"})
    offered["function"]["strict"] = strict
    options = {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}
    _, _, found, finish_reason = both(parroting, **told("[calls]", response_format=FORM, tools=[offered], **options))
    assert finish_reason == "tool_calls"
    assert [json.loads(call["arguments"])["knot"] for call in found] == [knot]


@pytest.mark.parametrize(("most", "of_reasoning"), [(1, 0), (2, 2), (60, 3)])
def test_its_tokens_are_counted(parroting: httpx.Client, most: int, of_reasoning: int) -> None:
    """Those of a text that is held back too, since it may begin a delimiter."""
    body = told("[thinks]", max_tokens=most)
    usage = answer(parroting, PATH, **body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": of_reasoning}
    options = {"include_usage": True, "continuous_usage_stats": True}
    shown = [chunk["usage"] for chunk in chunks(parroting, PATH, **body, stream_options=options)]
    assert [each["completion_tokens_details"]["reasoning_tokens"] for each in shown][-1] == of_reasoning
    asked = {"input": "Which?", "max_output_tokens": most, "chat_template_kwargs": {"script": "[thinks]"}}
    made = answer(parroting, "/v1/responses", **asked)
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": of_reasoning}


@pytest.mark.parametrize("script", ["[says]", "[thinks, fits]", "[thinks, calls]", "[calls]", "[stumbles]"])
@pytest.mark.parametrize(("temperature", "seeds"), [(0.0, 1), (100.0, 3)])
def test_no_answer_breaks_its_form(parroting: httpx.Client, script: str, temperature: float, seeds: int) -> None:
    """Whatever a prompt has begun or ended, and whatever the model wants to write."""
    for hushed, tools, seed in product((False, True), ({}, {"tools": TOOLS}), range(seeds)):
        form = {"structured_outputs": {"choice": ["yes", "no"]}}
        body = told(script, hushed=hushed, max_tokens=80, temperature=temperature, seed=seed, **form, **tools)
        content, reasoning, calls, finish_reason = both(parroting, **body)
        assert finish_reason == "length" or content in ("yes", "no") or (calls and content is None)
        assert not (hushed and reasoning)
        assert all(call["name"] in ("tie", "count") for call in calls)


def test_it_precedes_calls_that_must_come(parroting: httpx.Client) -> None:
    body = told("[thinks, calls]", tools=TOOLS, tool_choice="required", max_tokens=60)
    content, reasoning, calls, finish_reason = both(parroting, **body)
    assert (content, reasoning, finish_reason) == (None, "Tie!", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("count", {"what": "ropes"})]


def test_delimiters_may_be_tokens_of_their_own(parroting: httpx.Client) -> None:
    """As in Qwen's tokenizers. The library takes no text for them."""
    form = {"structured_outputs": {"regex": "Four[.]"}}
    assert both(parroting, **told("[thinks]", **form)) == ("Four.", "Turns of a rope.", [], "stop")


def test_responses_have_it_too(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        extra = {"chat_template_kwargs": {"script": "[thinks, fits]"}}
        form: Any = {"format": {"type": "json_schema", "name": "knot", "schema": SCHEMA}}
        found = client.responses.create(model="parrot", input="Which?", text=form, extra_body=extra)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    assert json.loads(found.output_text) == {"knot": "hitch"}
    assert found.usage is not None
    assert found.usage.output_tokens_details.reasoning_tokens == 3


class TestThought:
    HERMES = "<|im_start|>assistant\n"

    def of(self, name: str, chat: str, prompt: str) -> Thought | None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template, tokenizer.response_template = chat, BUILT_IN[name]
        return thought_of(tokenizer, prompt)

    @pytest.mark.parametrize(
        ("name", "prompt", "begun"),
        [
            ("hermes", HERMES, False),
            ("hermes", f"{HERMES}<think>\n", True),
            ("hermes", f"{HERMES}<think>", True),
            ("hermes", f"{HERMES}<think></think>", None),
            ("hermes", "<|assistant|><think>", True),
            ("hermes", "<|assistant|>\n<think></think>\n", None),
            ("hermes", "<|assistant|></think>", None),
            ("hermes", f"{HERMES}<think>\n\n</think>\n\n", None),
            ("hermes", f"{HERMES}Sure: ", None),
            ("hermes", "<|assistant|>", False),
            ("hermes", "<|assistant|><think>\n", True),
            ("chatml_think", HERMES, False),
            ("deepseek_r1", "<\uff5cAssistant\uff5c><think>\n", True),
            ("deepseek_r1", "<\uff5cAssistant\uff5c></think>", None),
        ],
    )
    def test_of_a_prompt(self, name: str, prompt: str, begun: bool | None) -> None:
        expected = None if begun is None else Thought("<think>", "</think>", begun)
        assert self.of(name, "</think>", prompt) == expected
        assert self.of(name, "no thoughts", prompt) is None

    @pytest.mark.parametrize(
        ("reasoning", "ends"),
        [
            ({"open": "<think>", "close": "</think>"}, ("<think>", "</think>")),
            ({"open": "<think>\n", "close": "\n</think>"}, ("<think>\n", "\n</think>")),
            ({"open": ["<think>", "<t>"], "close": "</think>"}, None),
            ({"open_pattern": "<think>|x", "close": "</think>"}, None),
            ({"open_pattern": r"<think>\w", "close": "</think>"}, None),
        ],
    )
    def test_of_a_template_of_the_checkpoint(self, reasoning: dict[str, Any], ends: tuple[str, str] | None) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "\n</think>"
        fields: dict[str, Any] = {"content": {}, "reasoning_content": reasoning}
        tokenizer.response_template = {"start_anchor": "A:", "fields": fields}
        assert thought_of(tokenizer, "A:") == (None if ends is None else Thought(*ends, begun=False))
        if ends is not None:
            assert thought_of(tokenizer, f"A:{ends[0]}") == Thought(*ends, begun=True)
            for over in (f"A:{''.join(ends)}\n", "A:Sure: "):
                assert thought_of(tokenizer, over) is None
        fields["content"] = {"open": "<text>"}
        assert not thinks(tokenizer), "the beginning of the text would be missing in a form"

    def test_one_without_a_known_end_is_not_begun(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "</think>"
        reasoning = {"open": "<think>", "close": ["</think>", "</t>"]}
        tokenizer.response_template = {"start_anchor": "A:", "fields": {"content": {}, "thinking": reasoning}}
        with pytest.raises(ValueError, match="in several ways"):
            thought_of(tokenizer, "A:<think>")

    def test_thinking_needs_a_chat_template_that_knows_of_it(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template, tokenizer.response_template = "{{ messages }}", BUILT_IN["hermes"]
        assert not thinks(tokenizer)
        tokenizer.chat_template = "{{ content.split('</think>') }}"
        assert thinks(tokenizer)
        tokenizer.response_template = None
        assert not thinks(tokenizer)
        assert thought_of(tokenizer, "") is None


@pytest.mark.parametrize(
    ("script", "fields", "content"),
    [
        ("[says]", {}, "Three turns."),
        ("[says]", {"tools": TOOLS}, "Three turns."),
        ("[fits]", {"response_format": FORM}, '{ "knot" : "hitch" }'),
    ],
)
def test_a_prompt_that_lost_its_end_has_begun_none(
    parroting: httpx.Client, script: str, fields: dict[str, Any], content: str
) -> None:
    ask = [{"role": "user", "content": f"How many turns? {script} And more."}]
    body = {**told("", begun=True, **fields), "messages": ask, "return_token_ids": True, "temperature": 0}
    whole = answer(parroting, PATH, **body, max_tokens=1)["prompt_token_ids"]
    (last,) = answer(parroting, "/tokenize", prompt=script, add_special_tokens=False)["tokens"]
    keeps = whole.index(last) + 1
    cut = {**body, "truncate_prompt_tokens": keeps, "truncation_side": "right", "max_tokens": 40}
    assert both(parroting, **cut) == (content, None, [], "stop")
    found = answer(parroting, PATH, **cut)
    assert (found["prompt_token_ids"], found["usage"]["prompt_tokens"]) == (whole[:keeps], keeps)
    long = {**cut, "truncate_prompt_tokens": len(whole), "max_tokens": 2}
    assert answer(parroting, PATH, **long)["choices"][0]["message"]["reasoning_content"]
