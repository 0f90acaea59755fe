"""``tool_choice`` of the type ``allowed_tools``: the template writes all functions, and some may be called."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.service.openai.conftest import answer, chunks
from tests.service.openai.parrot import SCRIPTS, TOOLS

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: list[Any] = [{"role": "user", "content": "How many turns?"}]
FLAT: list[Any] = [{"type": "function", **each["function"]} for each in TOOLS]


def told(script: str, *names: str, mode: str = "auto", **body: Any) -> dict[str, Any]:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    asked = {"messages": ASK, "tools": TOOLS, "chat_template_kwargs": {"script": script}}
    return {**asked, "tool_choice": choice, "max_tokens": 300, **body}


def told_flat(script: str, *names: str, mode: str = "auto", **body: Any) -> dict[str, Any]:
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    asked = {"input": "How many turns?", "tools": FLAT, "chat_template_kwargs": {"script": script}}
    return {**asked, "tool_choice": choice, "max_output_tokens": 300, **body}


def names_of(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


BOTH = "".join(SCRIPTS["[both]"])
COUNT, TIE = BOTH[BOTH.index("<") : BOTH.index("<tool_call>\n")], BOTH[BOTH.index("<tool_call>\n") :]
TEXTS = [
    (("tie", "count"), "I will count.", ["count", "tie"]),
    (("tie",), f"I will count. \n\n{COUNT}", ["tie"]),
    (("count",), f"I will count.\n{TIE}", ["count"]),
]


@pytest.mark.parametrize(("names", "content", "calls"), TEXTS, ids=str)
def test_a_call_of_another_function_is_text(
    parroting: httpx.Client, names: tuple[str, ...], content: str, calls: list[str]
) -> None:
    (choice,) = answer(parroting, CHAT, **told("[both]", *names))["choices"]
    assert (names_of(choice["message"]), choice["finish_reason"]) == (calls, "tool_calls")
    said = choice["message"]["content"]
    assert said.split() == content.split()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(parroting, CHAT, **told("[both]", *names))]
    assert "".join(delta.get("content") or "" for delta in deltas) == said
    assert [name for delta in deltas for name in names_of(delta)] == calls


def test_no_call_is_left(parroting: httpx.Client) -> None:
    (choice,) = answer(parroting, CHAT, **told("[calls]", "count"))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(SCRIPTS["[calls]"]), "stop")
    assert "tool_calls" not in choice["message"]
    (item,) = answer(parroting, RESPONSES, **told_flat("[calls]", "count"))["output"]
    assert item["content"][0]["text"] == "".join(SCRIPTS["[calls]"])


@pytest.mark.parametrize("name", ["tie", "count"])
def test_required_forms_calls_of_these(parroting: httpx.Client, name: str) -> None:
    """The script calls the other function."""
    required = told("[both]", name, mode="required", seed=1, temperature=20.0)
    (choice,) = answer(parroting, CHAT, **required)["choices"]
    assert {*names_of(choice["message"])} == {name}
    flat = answer(parroting, RESPONSES, **told_flat("[both]", name, mode="required", seed=1, temperature=20.0))
    assert {item["name"] for item in flat["output"] if item["type"] == "function_call"} == {name}
    functions = [{"type": "function", "name": name}]
    assert flat["tool_choice"] == {"type": "allowed_tools", "mode": "required", "tools": functions}


def test_the_prompt_is_that_of_all_tools(parroting: httpx.Client) -> None:
    asked: dict[str, Any] = {"return_token_ids": True, "max_tokens": 1}
    whole = answer(parroting, CHAT, **told("[says]", "tie") | asked | {"tool_choice": "auto"})
    for mode in ("auto", "required"):
        some = answer(parroting, CHAT, **told("[says]", "tie", mode=mode) | asked)
        assert some["prompt_token_ids"] == whole["prompt_token_ids"]
    named = {"type": "function", "function": {"name": "tie"}}
    one = answer(parroting, CHAT, **told("[says]", "tie") | asked | {"tool_choice": named})
    assert len(one["prompt_token_ids"]) < len(whole["prompt_token_ids"])


def test_a_form_leaves_room_for_these_only(parroting: httpx.Client) -> None:
    form = {"type": "json_object"}
    for name in ("tie", "count"):
        (choice,) = answer(parroting, CHAT, **told("[calls]", name, response_format=form, temperature=0))["choices"]
        assert {*names_of(choice["message"])} == {name}, "the script begins a call"


def test_the_client_of_openai_sends_it(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        body, flat = told("[both]", "tie"), told_flat("[both]", "tie")
        extra = {"chat_template_kwargs": body.pop("chat_template_kwargs")}
        flat.pop("chat_template_kwargs")
        chat = client.chat.completions.create(model="parrot", extra_body=extra, **body)
        assert [call.function.name for call in chat.choices[0].message.tool_calls] == ["tie"]
        response = client.responses.create(model="parrot", extra_body=extra, **flat)
        assert [item.name for item in response.output if item.type == "function_call"] == ["tie"]
        assert response.tool_choice.model_dump()["mode"] == "auto"


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tool_choice", "'x' is none of the tools: tie,"),
        ({"tools": []}, "tool_choice.allowed_tools.tools", "needs at least 1 entry"),
        ({"mode": "none"}, "tool_choice.allowed_tools.mode", "'required'"),
        ({"mode": None}, "tool_choice.allowed_tools.mode", "required"),
    ],
)
def test_refusals_name_the_field(parroting: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    body = told("[says]", "tie")
    body["tool_choice"]["allowed_tools"] |= change
    error = parroting.post(CHAT, json=body).json()["error"]
    assert error["param"] == param, error
    assert says in error["message"]
