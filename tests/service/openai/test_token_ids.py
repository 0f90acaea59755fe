"""``return_token_ids`` of vLLM: token ids of prompts and answers, whole and in the chunks of streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.service.openai.conftest import answer, chunks
from tests.service.openai.parrot import TOOLS

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"return_token_ids": True, "max_tokens": 12, "seed": 3, "n": 2, "ignore_eos": True}


def added_up(found: list[dict[str, Any]], index: int) -> tuple[list[int], list[list[int] | None]]:
    """Token ids of one choice in all chunks, and the prompt's of each."""
    mine = [chunk for chunk in found if chunk["choices"] and chunk["choices"][0]["index"] == index]
    ids = [token for chunk in mine for token in chunk["choices"][0].get("token_ids") or []]
    prompts = [chunk.get("prompt_token_ids", chunk["choices"][0].get("prompt_token_ids")) for chunk in mine]
    return ids, prompts


@pytest.mark.parametrize("change", [{}, {"stop": ["e", "o"]}, {"echo": True, "logprobs": 1}], ids=str)
def test_completions_have_them_in_their_choices(http: httpx.Client, tokenizer: Any, change: dict[str, Any]) -> None:
    given = ["The ropes", [5, 9, 14]]
    body = {"prompt": given, **ASKED, **change}
    whole = answer(http, **body)
    prompts = [tokenizer(given[0])["input_ids"], given[1]]
    streamed = chunks(http, **body)
    for choice in whole["choices"]:
        assert choice["prompt_token_ids"] == prompts[choice["index"] // 2]
        text = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["text"].strip() in tokenizer.decode(choice["prompt_token_ids"], skip_special_tokens=True) + text
        assert change.get("stop") or len(choice["token_ids"]) == ASKED["max_tokens"]
        ids, sent = added_up(streamed, choice["index"])
        assert ids == choice["token_ids"]
        assert sent == [choice["prompt_token_ids"], *[None] * (len(sent) - 1)]
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]


def test_the_token_of_scoring_is_one(http: httpx.Client) -> None:
    scored = {"prompt": [5, 9, 14], "echo": True, "logprobs": 1, "temperature": 0, "return_token_ids": True}
    (one,) = answer(http, **scored, max_tokens=1)["choices"]
    (drawn,) = answer(http, **{**scored, "echo": False}, max_tokens=1)["choices"]
    assert one["token_ids"] == drawn["token_ids"]
    assert answer(http, **scored, max_tokens=0)["choices"][0]["token_ids"] == []


def test_chats_have_the_prompts_beside_the_choices(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a rope"}]
    body = {"messages": messages, **ASKED, "stop": ["e"], "logprobs": True}
    whole, streamed = answer(http, CHAT, **body), chunks(http, CHAT, **body)
    assert whole["prompt_token_ids"] == answer(http, "/tokenize", messages=messages)["tokens"]
    for choice in whole["choices"]:
        ids, sent = added_up(streamed, choice["index"])
        assert ids == choice["token_ids"]
        assert sent == [whole["prompt_token_ids"], *[None] * (len(sent) - 1)]
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for chunk in streamed:
        (choice,) = chunk["choices"]
        shown = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert len(shown) <= len(choice.get("token_ids", [])), "a token comes with its text"


@pytest.mark.parametrize("several", [True, False])
def test_tokens_of_calls_are_among_them(parroting: httpx.Client, several: bool) -> None:
    """vLLM loses some of them in streams (vllm-project/vllm#27482)."""
    body = {"messages": [{"role": "user", "content": "Tie."}], "tools": TOOLS, "return_token_ids": True}
    body |= {"chat_template_kwargs": {"script": "[both]"}, "parallel_tool_calls": several}
    whole = answer(parroting, CHAT, **body)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"] == (9 if several else 5)
    assert added_up(chunks(parroting, CHAT, **body), 0)[0] == whole["choices"][0]["token_ids"]


def test_they_come_on_request_only(http: httpx.Client) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "a"}, CHAT: {"messages": []}}
    bodies[CHAT]["messages"] = [{"role": "user", "content": "a"}]
    for path, body in bodies.items():
        whole, streamed = answer(http, path, **body, max_tokens=2), chunks(http, path, **body, max_tokens=2)
        for each in (whole, *streamed):
            assert not {"token_ids", "prompt_token_ids"} & {*each, *each["choices"][0]}
    refused = http.post("/v1/responses", json={"input": "a", "return_token_ids": True}).json()["error"]
    assert refused["message"] == "return_token_ids is not supported by this server; leave it out (or send false)"
