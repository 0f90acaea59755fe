"""Fields of OpenAI and vLLM that this server does not have: values that ask for nothing pass, others are refused."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from service.api.openai.schemas import ChatRequest, CompletionRequest
from service.api.openai.unsupported import NOT_SUPPORTED
from tests.service.openai.conftest import answer, chunks

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The ropes", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0},
}
OWN = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


@pytest.mark.parametrize("path", BODIES)
def test_asking_for_nothing_changes_nothing(http: httpx.Client, path: str) -> None:
    plainly = answer(http, path, **BODIES[path])["choices"]
    lacking = {name: values for name, values in NOT_SUPPORTED.items() if name not in OWN[path].model_fields}
    assert len(lacking) > 25
    nulls = dict.fromkeys(lacking)
    assert answer(http, path, **BODIES[path], **nulls)["choices"] == plainly
    for number in range(2):
        neutral = {name: values[number] for name, values in lacking.items() if len(values) > number}
        assert answer(http, path, **BODIES[path], **neutral)["choices"] == plainly


@pytest.mark.parametrize("path", BODIES)
def test_anything_else_is_refused_by_name(http: httpx.Client, path: str) -> None:
    for name in NOT_SUPPORTED.keys() - OWN[path].model_fields.keys():
        error = http.post(path, json={**BODIES[path], name: ["something"]}).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is not supported by this server; leave it out")
        does = f"structured_outputs.{name.removeprefix('guided_')} does it"
        assert error["message"].endswith(does) == (name in {"guided_choice", "guided_json", "guided_regex"})


def test_an_effort_of_reasoning_is_for_chats(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={**BODIES["/v1/completions"], "reasoning_effort": "low"})
    assert reply.json()["error"]["message"].endswith(
        "leave it out. Chats take it as reasoning_effort, responses as reasoning.effort, "
        "messages as output_config.effort"
    )


def test_a_field_inside_is_named_once(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "The", "refusal": "no"}]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "messages.0.refusal"
    assert error["message"].startswith("messages.0.refusal is not supported by this server; leave it out")


def test_a_near_name_is_no_advice_for_a_field_of_others(http: httpx.Client) -> None:
    reply = http.post("/v1/completions", json={**BODIES["/v1/completions"], "max_completion_tokens": 3})
    assert reply.json()["error"]["message"] == "max_completion_tokens is not supported by this server; leave it out"


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
def test_cached_tokens_of_a_prompt(http: httpx.Client, path: str) -> None:
    text, new = f"{path} " * 40, {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2}
    given = {
        "/v1/completions": {"prompt": [text, text[:9]]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
    }

    def cached(**fields: Any) -> int:
        usage = answer(http, path, **given[path], **new, **fields)["usage"]
        kind = "input" if path == "/v1/responses" else "prompt"
        assert usage[f"{kind}_tokens_details"]["cached_tokens"] < usage[f"{kind}_tokens"]
        return int(usage[f"{kind}_tokens_details"]["cached_tokens"])

    assert cached() == 0
    found = cached()
    assert found > 64
    if path in BODIES:
        assert cached(n=2, temperature=1) == found, "a prompt counts once"
        options = {"include_usage": True, "continuous_usage_stats": True}
        for chunk in chunks(http, path, **given[path], **new, stream_options=options)[-3:]:
            assert chunk["usage"]["prompt_tokens_details"]["cached_tokens"] in (found, 0)
        assert chunk["usage"]["prompt_tokens_details"]["cached_tokens"] == found
    if path == "/v1/completions":
        assert cached(echo=True, logprobs=0) == 0, "scores read it all"


@pytest.mark.parametrize("path", BODIES)
def test_usage_so_far_is_in_every_chunk(http: httpx.Client, path: str) -> None:
    body = {**BODIES[path], "max_tokens": 6, "n": 2, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(http, path, **body, stream_options=options)
    prompt = found[0]["usage"]["prompt_tokens"]
    for index in range(2):
        mine = [chunk["usage"] for chunk in found if chunk["choices"] and chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in mine]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in mine)
    assert found[-1]["usage"]["completion_tokens"] == 12
    reply = http.post(path, json={**body, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options.continuous_usage_stats")


def test_special_tokens_as_asked(http: httpx.Client, url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:

        def prompt_tokens(path: str, **fields: Any) -> int:
            return int(answer(http, path, **BODIES[path], **fields)["usage"]["prompt_tokens"])

        for path, usual in (("/v1/completions", True), ("/v1/chat/completions", False)):
            with_them, without = (prompt_tokens(path, add_special_tokens=value) for value in (True, False))
            assert with_them == without + 1
            assert prompt_tokens(path) == (with_them if usual else without)
        extra = client.completions.create(model="tiny", prompt="The ropes", extra_body={"add_special_tokens": False})
        assert extra.usage is not None
        assert extra.usage.prompt_tokens == prompt_tokens("/v1/completions", add_special_tokens=False)


def test_more_than_the_vocabulary_is_all_of_it(http: httpx.Client) -> None:
    body = {"prompt": "The ropes", "max_tokens": 8, "temperature": 1.3, "seed": 4}
    assert answer(http, **body, top_k=10**6)["choices"] == answer(http, **body)["choices"]
