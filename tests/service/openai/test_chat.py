"""POST /v1/chat/completions over a real socket: the model's own template, streams, log-probabilities, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.generation.token_names import BYTE_LEVEL
from tests.service.openai.conftest import answer, chunks, counts, plain_logprobs

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "The 3 ropes?"}]
TEMPLATED = "<system>Be short.\n<user>The 3 ropes?\n<assistant>"
PATH = "/v1/chat/completions"


def test_a_chat_is_a_completion_of_the_templated_text(http: httpx.Client, tokenizer: Any) -> None:
    ids = tokenizer(TEMPLATED, add_special_tokens=False)["input_ids"]
    got = answer(http, PATH, messages=MESSAGES, temperature=0, max_tokens=12, model="tiny@ntk:2")
    same = answer(http, prompt=ids, temperature=0, max_tokens=12, model="tiny@ntk:2")
    (choice,) = got["choices"]
    assert choice["message"] == {"role": "assistant", "content": same["choices"][0]["text"]}
    assert choice["pe"] == same["choices"][0]["pe"]
    assert (counts(got["usage"]), got["object"]) == (counts(same["usage"]), "chat.completion")
    assert got["model"] == "tiny@ntk:2"
    parts = [{"type": "text", "text": "The 3 "}, {"type": "text", "text": "ropes?"}]
    in_parts = [MESSAGES[0], {"role": "user", "content": parts}]
    assert answer(http, PATH, messages=in_parts, temperature=0, max_tokens=12, pe={"method": "ntk", "factor": 2})[
        "choices"
    ] == [choice]


def test_log_probabilities(http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3, "logprobs": True}
    content = answer(http, PATH, **body, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    ids = tokenizer(TEMPLATED, add_special_tokens=False)["input_ids"]
    for entry in content:
        row = plain_logprobs(tiny, ids)[-1]
        ids.append(int(row.argmax()))
        assert entry["logprob"] == pytest.approx(float(row.max()), abs=1e-4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"], "identical and unrounded"
        assert entry["bytes"] == [BYTE_LEVEL[letter] for letter in tokenizer.convert_ids_to_tokens(ids[-1])]
    assert [entry["top_logprobs"] for entry in answer(http, PATH, **body)["choices"][0]["logprobs"]["content"]] == [
        []
    ] * 3
    assert answer(http, PATH, messages=MESSAGES, max_tokens=1)["choices"][0]["logprobs"] is None


def test_the_end_of_a_text_has_the_bytes_of_its_name(http: httpx.Client, tokenizer: Any) -> None:
    """As in vLLM: it is among the log-probabilities, and not in the text."""
    bias = {str(tokenizer.eos_token_id): 100}
    (choice,) = answer(http, PATH, messages=MESSAGES, logit_bias=bias, logprobs=True)["choices"]
    (last,) = choice["logprobs"]["content"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert (last["token"], bytes(last["bytes"])) == (tokenizer.eos_token, tokenizer.eos_token.encode())


def test_a_stream_adds_up_to_the_answer(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "n": 2, "seed": 5, "max_tokens": 16, "logprobs": True}
    whole = answer(http, PATH, **body)
    got = chunks(http, PATH, **body, stream_options={"include_usage": True})
    assert (got[-1]["choices"], counts(got[-1]["usage"])) == ([], counts(whole["usage"]))
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [c for chunk in got for c in chunk["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        streamed = [entry["token"] for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert streamed == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["pe"] == choice["pe"]


def test_without_a_limit_the_server_and_the_context_are_the_limit(http: httpx.Client) -> None:
    text = "a b " * 1340
    reply = answer(
        http, PATH, messages=[{"role": "user", "content": text}], temperature=0, pe={"method": "linear", "factor": 64}
    )
    assert reply["choices"][0]["finish_reason"] in ("length", "stop")
    assert reply["usage"]["total_tokens"] <= 4096
    too_long = http.post(PATH, json={"messages": [{"role": "user", "content": text * 2}], "stream": True})
    error = too_long.json()["error"]
    assert (too_long.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["n_ctx"] == 4096 < error["n_prompt_tokens"]


def test_a_model_without_a_template_says_so(client: httpx.Client) -> None:
    reply = client.post(PATH, json={"messages": MESSAGES})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "no_chat_template")
    assert "'tiny' has no chat template" in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "no tools here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url",
            "no images",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
            "messages.0.tool_calls.0.function",
            "required",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "refusal": "b"}]}, "messages.0.refusal", "send null)"),
        ({"messages": [{"role": "assistant", "annotations": "b"}]}, "messages.0.annotations", "send [])"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages.0.content", "a text or a list of parts, not 4"),
        ({"stop": 4}, "stop", "must be a text or a list of texts, not 4"),
        ({"tool_choice": 4}, "tool_choice", "must be 'none', 'auto', 'required' or an object, not 4"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, not 0"),
        (
            {"max_completion_tokens": 1025},
            "max_completion_tokens",
            "1024 on this server, by its setting ROPEWAY_MAX_NEW",
        ),
        ({"n": 65}, "n", "at most 64 on this server, by its setting ROPEWAY_MAX_PROMPTS"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"metadata": {"run": 1}}, "metadata.run", "must be text, not 1"),
        ({"parallel_tool_calls": "maybe"}, "parallel_tool_calls", "must be true or false"),
        ({"surprise": True}, "surprise", "unknown field: there are "),
        ({"temprature": 1}, "temprature", "unknown field: did you mean temperature?"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    reply = http.post(PATH, json={"messages": MESSAGES, **change})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("store", True, "false"),
        ("service_tier", "flex", '"auto"'),
        ("modalities", ["text", "audio"], '["text"]'),
        ("functions", ["f"], "[]"),
        ("prediction", {"type": "content"}, None),
        ("documents", [{"text": "a"}], "[]"),
    ],
)
def test_what_is_not_supported_says_so(http: httpx.Client, field: str, value: Any, neutral: str | None) -> None:
    error = http.post(PATH, json={"messages": MESSAGES, field: value}).json()["error"]
    instead = "" if neutral is None else f" (or send {neutral})"
    assert error["message"] == f"{field} is not supported by this server; leave it out{instead}"
    assert (error["param"], error["code"]) == (field, "invalid_request")
    asks_for_nothing = None if neutral is None else json.loads(neutral)
    answer(http, PATH, messages=MESSAGES, max_tokens=1, **{field: asks_for_nothing})


def test_nothing_in_a_message_is_absent(http: httpx.Client) -> None:
    def prompt_tokens(**fields: Any) -> int:
        messages = [{"role": "assistant", **fields}, *MESSAGES]
        found: int = answer(http, PATH, messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
        return found

    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": []}
    assert prompt_tokens(content="hi", **nothing, name=None, reasoning="") == prompt_tokens(content="hi")
    assert prompt_tokens(content=None, **nothing) == prompt_tokens(content="")
    assert prompt_tokens(tool_calls=[], provider_specific_fields={}) == prompt_tokens(content="")


def test_the_newer_name_of_the_most_tokens_counts(http: httpx.Client) -> None:
    found = answer(http, PATH, messages=MESSAGES, temperature=0, max_tokens=9, max_completion_tokens=2)
    assert found["usage"]["completion_tokens"] == 2


def test_tools_and_formats_that_ask_for_nothing(http: httpx.Client) -> None:
    nothing: dict[str, Any] = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me"}
    nothing |= {"parallel_tool_calls": True, "store": False, "service_tier": "default", "modalities": ["text"]}
    nothing |= {"metadata": {"run": "a"}}
    plainly = answer(http, PATH, messages=MESSAGES, temperature=0, max_completion_tokens=4)["choices"]
    assert answer(http, PATH, messages=MESSAGES, temperature=0, max_tokens=4, **nothing)["choices"] == plainly
