"""``/v1/responses`` by the ``openai`` package, and the same text as from chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.service.openai.conftest import answer

PATH = "/v1/responses"
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "The 3 ropes?"}]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True) as client:
        yield client


def chat(http: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 12, **fields}
    return answer(http, "/v1/chat/completions", **body)


def test_it_answers_as_a_chat_does(client: openai.OpenAI, http: httpx.Client) -> None:
    got = client.responses.create(
        model="tiny@ntk:2", instructions="Be short.", input="The 3 ropes?", max_output_tokens=12, **GREEDY
    )
    same = chat(http, MESSAGES, model="tiny@ntk:2")
    assert got.output_text == same["choices"][0]["message"]["content"]
    assert (got.model_extra or {})["pe"] == same["choices"][0]["pe"]
    assert got.usage is not None
    counts = got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens
    assert counts == tuple(same["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion", "total"))
    assert (got.status, got.model, got.max_output_tokens) == ("incomplete", "tiny@ntk:2", 12)
    assert got.incomplete_details is not None
    assert got.incomplete_details.reason == "max_output_tokens"


def test_a_count_is_that_of_the_answer(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "a b " * 700} for _ in range(5)]
    asked: list[dict[str, Any]] = [
        {"input": "The 3 ropes?"},
        {"input": "The 3 ropes?", "instructions": "Be short.", "reasoning": {"effort": "low"}},
        {"input": long, "instructions": "Be short.", "truncation": "auto"},
    ]
    for fields in asked:
        usage = client.responses.create(
            model="tiny@ntk:2", **fields, extra_body={"stop_token_ids": [*range(256)]}
        ).usage
        count = client.responses.input_tokens.count(model="tiny@ntk:2", **fields)
        assert usage is not None
        assert (count.object, count.input_tokens) == ("response.input_tokens", usage.input_tokens)
    assert count.input_tokens < client.responses.input_tokens.count(model="tiny", input=long).input_tokens
    for name in ("previous_response_id", "personality"):
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported"):
            client.responses.input_tokens.count(input="a", extra_body={name: "friendly"})


def test_a_stop_completes_it(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="The 3 ropes?", max_output_tokens=12, **GREEDY)
    letter = next(letter for letter in whole.output_text[2:] if letter.strip())
    extra = {"ignore_eos": True, "stop": letter}
    got = client.responses.create(
        model="tiny", input="The 3 ropes?", max_output_tokens=12, temperature=0, extra_body=extra
    )
    assert (got.status, got.incomplete_details) == ("completed", None)
    assert got.output_text == whole.output_text[: whole.output_text.index(letter)]


def test_an_answer_goes_back_as_the_client_stores_it(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(model="tiny", input="The 3 ropes?", max_output_tokens=4, **GREEDY)
    stored = [item.model_dump() for item in first.output]
    history: Any = [{"role": "user", "content": "The 3 ropes?"}, *stored, {"role": "user", "content": "And 4?"}]
    second = client.responses.create(model="tiny", input=history, max_output_tokens=12, **GREEDY)
    plain = [
        {"role": "user", "content": "The 3 ropes?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And 4?"},
    ]
    assert second.output_text == chat(http, plain)["choices"][0]["message"]["content"]


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "The 3 ropes?", "max_output_tokens": 12, **GREEDY}
    whole = client.responses.create(**asked)
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response  # type: ignore[union-attr]
    assert isinstance(last, Response)
    assert (last.output_text, last.usage) == (whole.output_text, whole.usage)
    extra = {"ignore_eos": True, "stop": whole.output_text[5]}
    with client.responses.stream(**{**asked, "extra_body": extra}) as helped:
        completed = helped.get_final_response()
    assert (completed.status, completed.output_text) == ("completed", whole.output_text.split(whole.output_text[5])[0])


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": {}}, "input", "must be a text or a list of items, not an object"),
        (
            {"input": [{"role": "user", "content": True}]},
            "input.0.content",
            "must be a text or a list of parts, not true",
        ),
        ({"tool_choice": []}, "tool_choice", "must be 'none', 'auto', 'required' or an object, not a list"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "'user'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "'input_text'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"max_output_tokens": 1025}, "max_output_tokens", "at most 1024"),
        ({"max_tokens": 5}, "max_tokens", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "the type text, json_object or json_schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"include": ["message.input_image.image_url"]}, "include.0", "'message.output_text.logprobs'"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported by this server; leave it out"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "'minimal'"),
        ({"store": True}, "store", "(or send false)"),
        ({"n": 2}, "n", "unknown field"),
        ({"chat_template_kwargs": {"moood": 1}}, "chat_template_kwargs", "did you mean mood?"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    reply = http.post(PATH, json={"input": "a", "max_output_tokens": 1, **change})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_what_asks_for_nothing_passes(http: httpx.Client) -> None:
    nothing = {
        "background": False,
        "include": [],
        "metadata": {"run": "1"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None},
        "store": False,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }
    body: dict[str, Any] = {"input": "a", "max_output_tokens": 3, "temperature": 0}
    got = answer(http, PATH, **body, **nothing)
    assert got["metadata"] == {"run": "1"}
    assert got["output"][0]["content"] == answer(http, PATH, **body)["output"][0]["content"]


def test_too_long_a_conversation_is_refused_before_a_stream_opens(http: httpx.Client) -> None:
    error = http.post(PATH, json={"input": "a b " * 3000, "stream": True}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_a_failure_in_a_stream_is_a_typed_event(client: openai.OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "a", "max_output_tokens": 1000}
    extra = {"ignore_eos": True, "timeout_s": 0.2}  # a busy machine takes 0.05 s for the first token
    with http.stream("POST", PATH, json={**asked, **extra, "stream": True}) as reply:
        lines = list(reply.iter_lines())
    last = json.loads(next(line for line in reversed(lines) if '"error"' in line).removeprefix("data: "))
    assert "event: error" in lines
    assert (last["type"], last["code"], last["error"]["code"]) == ("error", "deadline_exceeded", "deadline_exceeded")
    assert last["sequence_number"] > 3
    with pytest.raises(openai.APIError, match="not finished within"):
        list(client.responses.create(**asked, stream=True, extra_body=extra))


LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {
        "model": "tiny@ntk:2",
        "input": "The 3 ropes?",
        "max_output_tokens": 12,
        **GREEDY,
        **LOGPROBS,
    }
    got = client.responses.create(**asked)
    same = chat(http, MESSAGES[1:], model="tiny@ntk:2", logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    (part,) = got.output[0].content  # type: ignore[union-attr]
    assert [token.model_dump() for token in part.logprobs] == same["content"]  # type: ignore[union-attr]
    assert (len(same["content"]), got.top_logprobs) == (12, 2)
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert events[-1].response.output[0].content == [part]
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    (done,) = [event.logprobs for event in events if event.type == "response.output_text.done"]
    for tokens in (streamed, done):
        assert [(token.token, token.logprob) for token in tokens] == [
            (token["token"], token["logprob"]) for token in same["content"]
        ]
    back: Any = [{"role": "user", "content": "The 3 ropes?"}, *(item.model_dump() for item in got.output)]
    client.responses.create(**{**asked, "input": back})
    reply = http.post(PATH, json={"input": "a", "top_logprobs": 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_logprobs")
    few = client.responses.create(**{**asked, "top_logprobs": 0})
    assert [token.top_logprobs for token in few.output[0].content[0].logprobs] == [[]] * 12  # type: ignore[union-attr]


def test_hints_come_back(http: httpx.Client) -> None:
    hints = {"parallel_tool_calls": False, "prompt_cache_key": "a", "safety_identifier": "b", "user": "c"}
    got = answer(http, PATH, input="a", max_output_tokens=1, **hints)
    assert {name: got[name] for name in hints} == hints
