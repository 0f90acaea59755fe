"""Options of chat templates, as vLLM has them, in chats and in ``/tokenize``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from service.api.openai.messages import Message
from service.api.openai.schemas import ChatRequest
from service.api.openai.templating import Templating
from service.errors import ApiError
from service.models.text.chat import PLAIN, template_options
from service.models.text.response_templates import BUILT_IN
from tests.service.openai.conftest import answer

MESSAGES = [{"role": "user", "content": "The 3 ropes?"}, {"role": "assistant", "content": "They are"}]
WRITTEN = "<user>The 3 ropes?\n<assistant>They are"
PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, f"{WRITTEN}\n<assistant>"),
        ({"add_generation_prompt": False}, f"{WRITTEN}\n"),
        ({"continue_final_message": True}, WRITTEN),
        ({"continue_final_message": True, "add_generation_prompt": False}, WRITTEN),
        ({"chat_template_kwargs": {"mood": "glad"}}, f"{WRITTEN}\n<assistant>glad: "),
        ({"chat_template_kwargs": {"mood": ""}}, f"{WRITTEN}\n<assistant>"),
        ({"chat_template_kwargs": None, "continue_final_message": None}, f"{WRITTEN}\n<assistant>"),
    ],
)
def test_the_prompt_is_that_of_the_template(
    http: httpx.Client, tokenizer: Any, options: dict[str, Any], text: str
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer(http, "/tokenize", messages=MESSAGES, **options)["tokens"] == ids
    drawn: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    chat = answer(http, PATH, messages=MESSAGES, **drawn, **options)
    assert chat["usage"]["prompt_tokens"] == len(ids)
    assert chat["choices"][0]["message"]["content"] == answer(http, prompt=ids, **drawn)["choices"][0]["text"]


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "not with continue"),
        ({"chat_template_kwargs": {"moood": 1}}, "chat_template_kwargs", "did you mean mood?"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "there are mood"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "there are mood"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "there are mood"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs", "there are mood"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"mood": "x" * 20000}}, "chat_template_kwargs", "at most 16384 characters"),
        ({"continue_final_message": "content"}, "continue_final_message", "true or false"),
    ],
)
@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_refusals(http: httpx.Client, path: str, options: dict[str, Any], param: str, says: str) -> None:
    reply = http.post(path, json={"messages": MESSAGES, **options})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


@pytest.mark.parametrize(
    "options",
    [{"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template_kwargs": {"mood": "glad"}}],
)
def test_a_prompt_has_no_template(http: httpx.Client, options: dict[str, Any]) -> None:
    reply = http.post("/tokenize", json={"prompt": "a", **options})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(options)))


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (PLAIN, []),
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", []),
        ("{% generation %}{{ messages[0].content }}{%- endgeneration -%}{{ raise_exception('a') if tools }}", []),
        ("{% set day = day or strftime_now('%d') %}{{ day }}{{ namespace(a=1).a }}", ["day"]),
        ("{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}", ["enable_thinking"]),
    ],
)
def test_options_are_what_a_template_reads(tokenizer: Any, template: str, options: list[str]) -> None:
    own: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.chat_template = template
    assert template_options(own) == options


@pytest.mark.parametrize(
    ("template", "value"),
    [("{{ 10 // x }}", 0), ("{{ range(x) }}", 10**6), ("{{ '%(a)s' % x }}", {}), ("{{ x.a.b }}", 1)],
)
def test_a_template_that_fails_is_the_clients_error(tokenizer: Any, template: str, value: Any) -> None:
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.chat_template = template
    body = Templating(chat_template_kwargs={"x": value})
    with pytest.raises(ApiError, match=r"the model's chat template refuses them: .") as caught:
        body.templated([{"role": "user", "content": "a"}], SimpleNamespace(tokenizer=own))  # type: ignore[arg-type]
    assert caught.value.status == 400
    own.chat_template = "{{ messages[0].content }}{% if %}"
    with pytest.raises(ApiError, match="refuses them"):
        Templating().templated([{"role": "user", "content": "a"}], SimpleNamespace(tokenizer=own))  # type: ignore[arg-type]


def test_a_developer_speaks_as_the_system(http: httpx.Client) -> None:
    def prompt_of(path: str, field: str, role: str) -> Any:
        body = {field: [{"role": role, "content": "Be short."}, MESSAGES[0]]}
        found = answer(http, path, **body)
        usage = found.get("usage", {})
        return found.get("tokens") or usage.get("prompt_tokens") or usage["input_tokens"]

    for path, field in (("/tokenize", "messages"), (PATH, "messages"), ("/v1/responses", "input")):
        assert prompt_of(path, field, "developer") == prompt_of(path, field, "system") != prompt_of(path, field, "user")


EFFORTS: list[tuple[str, str, Any]] = [
    (PATH, "messages", {"reasoning_effort": "low"}),
    ("/v1/responses", "input", {"reasoning": {"effort": "low", "summary": None}}),
]


@pytest.mark.parametrize(("path", "field", "asked"), EFFORTS)
def test_effort_is_a_variable_of_the_template(
    http: httpx.Client, parroting: httpx.Client, path: str, field: str, asked: dict[str, Any]
) -> None:
    name = "reasoning.effort" if "reasoning" in asked else "reasoning_effort"

    def variable(effort: str) -> dict[str, Any]:
        return {field: MESSAGES[:1], "temperature": 0, "chat_template_kwargs": {"reasoning_effort": effort}}

    def answered(**body: Any) -> Any:
        found = answer(http, path, **body, ignore_eos=True, **{NEW[path]: 8})
        return found["output"][0]["content"] if "output" in found else found["choices"][0]["message"]["content"]

    def refused(client: httpx.Client, **body: Any) -> str:
        reply = client.post(path, json={field: MESSAGES[:1], **body})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        return str(reply.json()["error"]["message"])

    mine = answered(**{field: MESSAGES[:1], "temperature": 0}, **asked)
    assert mine == answered(**variable("low")) == answered(**variable("low"), **asked)
    assert mine != answered(**variable("high"))
    assert "differs from chat_template_kwargs.reasoning_effort" in refused(http, **variable("high"), **asked)
    assert refused(parroting, **asked).endswith(
        "chat_template_kwargs has those that it does: begun, enable_thinking, hushed, script"
    )


NEW = {PATH: "max_tokens", "/v1/responses": "max_output_tokens"}
"""Field of the most new tokens."""


def test_no_effort_asks_nothing_of_a_model_that_does_not_reason(tokenizer: Any) -> None:
    own = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    own.response_template, own.chat_template = BUILT_IN["hermes"], "{{ messages[0].content }}"
    asked = ChatRequest(model="m", messages=[Message(role="user", content="a")], reasoning_effort="none")
    messages, _ = asked.conversation()
    assert asked.templated(messages, SimpleNamespace(tokenizer=own)) == "a"  # type: ignore[arg-type]
    own.chat_template += "{% if hush %}</think>{% endif %}"
    with pytest.raises(ApiError, match="has those that it does: hush"):
        asked.templated(messages, SimpleNamespace(tokenizer=own))  # type: ignore[arg-type]
