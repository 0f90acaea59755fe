"""``stop_reason`` of vLLM: the stop string or the token of the request that ended an answer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.service.openai.conftest import ENDS, answer, chunks

NEW = 12
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [30, 31, 32]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "The 3 ropes?"}]},
}


def reasons(http: httpx.Client, path: str, **fields: Any) -> tuple[str, Any]:
    """Both of the whole answer, which the last chunk of a stream has too, and no chunk before it."""
    body = {**PATHS[path], "max_tokens": NEW, "temperature": 0, **fields}
    (whole,) = answer(http, path, **body)["choices"]
    *begun, last = (choice for chunk in chunks(http, path, **body) for choice in chunk["choices"])
    assert {choice.get("stop_reason") for choice in begun} <= {None}
    assert (last["stop_reason"], last["finish_reason"]) == (whole["stop_reason"], whole["finish_reason"])
    return whole["finish_reason"], whole["stop_reason"]


@pytest.mark.parametrize("path", PATHS)
def test_a_text_or_a_token(http: httpx.Client, path: str, tokenizer: Any) -> None:
    asked = {"ignore_eos": True, "return_token_ids": True}
    body = {**PATHS[path], "max_tokens": NEW, "temperature": 0, **asked}
    (free,) = answer(http, path, **body)["choices"]
    ids = free["token_ids"]
    at = next(at for at in range(2, NEW) if ids[at] not in ids[:at] and tokenizer.decode([ids[at]]).strip())
    text = tokenizer.decode([ids[at]])
    assert reasons(http, path, ignore_eos=True) == ("length", None)
    assert reasons(http, path, ignore_eos=True, stop_token_ids=[383, ids[at]]) == ("stop", ids[at])
    assert reasons(http, path, ignore_eos=True, stop=["never there", text]) == ("stop", text)
    both = {"ignore_eos": True, "stop_token_ids": [ids[at]], "stop": text, "include_stop_str_in_output": True}
    assert reasons(http, path, **both) == ("stop", text), "a text goes before its token"


@pytest.mark.parametrize("path", PATHS)
def test_an_end_of_the_text_is_none(http: httpx.Client, path: str) -> None:
    ends = {"logit_bias": {"1": 100}}
    assert reasons(http, path, **ends) == ("stop", None)
    assert reasons(http, path, **ends, stop_token_ids=[1]) == ("stop", None)
    assert reasons(http, path, **ends, stop_token_ids=[1], ignore_eos=True) == ("stop", 1)


def test_the_one_token_that_scoring_gives(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": ENDS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    (ended,) = answer(http, **body, return_token_ids=True)["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    stops = {"ignore_eos": True, "stop_token_ids": ended["token_ids"]}
    assert answer(http, **body, **stops)["choices"][0]["stop_reason"] == ended["token_ids"][0]


def test_the_openai_package_reads_it(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client:
        got = client.completions.create(model="tiny", prompt="The 3 ropes", logit_bias={"9": 100}, stop="\ufffd")
        extra = {"stop_token_ids": [9]}
        token = client.completions.create(model="tiny", prompt="a", logit_bias={"9": 100}, extra_body=extra)
    assert (got.choices[0].model_extra or {})["stop_reason"] is None
    assert (token.choices[0].model_extra or {})["stop_reason"] == 9
