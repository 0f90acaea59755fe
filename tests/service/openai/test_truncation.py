"""``truncate_prompt_tokens`` and ``truncation_side`` of vLLM: prompts keep their last or first tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.api.generation.prompts import Prompt, first_tokens, last_tokens, read_prompt
from tests.service.conftest import TEXT
from tests.service.openai.conftest import answer

CHAT = "/v1/chat/completions"
CONTEXT = 4096
ASKED: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
LONG = [{"role": "user", "content": "a b " * 3000}]


def prompts_of(http: httpx.Client, prompt: Any, keeps: int, **fields: Any) -> list[list[int]]:
    found = answer(http, **{**ASKED, **fields}, prompt=prompt, truncate_prompt_tokens=keeps)["choices"]
    return [choice["prompt_token_ids"] for choice in found]


def test_the_last_tokens_stay_behind_a_bos(http: httpx.Client, tokenizer: Any) -> None:
    text = TEXT[:120]
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert prompts_of(http, text, 10) == [[ids[0], *ids[-9:]]]
    assert prompts_of(http, text, 10, add_special_tokens=False) == [ids[-10:]]
    assert prompts_of(http, [text, [*range(5, 25)], "a"], 4) == [
        [ids[0], *ids[-3:]],
        [*range(21, 25)],
        tokenizer("a")["input_ids"],
    ]
    for keeps in (len(ids), 10**6, -1):
        assert prompts_of(http, text, keeps) == [ids]
    same = answer(http, **ASKED, prompt=[ids[0], *ids[-9:]])
    cut = answer(http, **ASKED, prompt=text, truncate_prompt_tokens=10)
    assert (cut["choices"], cut["usage"]["prompt_tokens"]) == (same["choices"], 10)


def test_the_echo_is_that_of_the_tokens(http: httpx.Client, tokenizer: Any) -> None:
    text = TEXT[:120]
    scored: dict[str, Any] = {**ASKED, "echo": True, "logprobs": 1, "truncate_prompt_tokens": 12}
    for given, special in ((text, True), (text, False), (tokenizer(text)["input_ids"][1:], True)):
        (choice,) = answer(http, **scored, prompt=given, add_special_tokens=special)["choices"]
        ids, shown = choice["prompt_token_ids"], choice["logprobs"]
        kept = tokenizer.decode(ids, skip_special_tokens=True)
        assert len(ids) == 12
        assert text.endswith(kept)
        assert choice["text"].startswith(kept)
        assert choice["text"][len(kept) :] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        offsets = shown["text_offset"]
        assert (len(shown["tokens"]), offsets[0], offsets[12]) == (15, 0, len(kept))
        assert offsets == sorted(offsets)
        (right,) = answer(http, **scored, prompt=given, add_special_tokens=special, truncation_side="right")["choices"]
        kept = tokenizer.decode(right["prompt_token_ids"], skip_special_tokens=True)
        assert text.startswith(kept)
        assert right["text"] == kept + tokenizer.decode(right["token_ids"], skip_special_tokens=True)
        assert (len(right["logprobs"]["tokens"]), right["logprobs"]["text_offset"][12]) == (15, len(kept))


def test_the_first_tokens_stay(http: httpx.Client, tokenizer: Any) -> None:
    text = TEXT[:120]
    ids = tokenizer(text)["input_ids"]
    assert prompts_of(http, text, 10, truncation_side="right") == [ids[:10]]
    assert prompts_of(http, [text, [*range(5, 25)], "a"], 4, truncation_side="right") == [
        ids[:4],
        [*range(5, 9)],
        tokenizer("a")["input_ids"],
    ]
    for keeps in (len(ids), -1):
        assert prompts_of(http, text, keeps, truncation_side="right") == [ids]
    assert prompts_of(http, text, 10, truncation_side="left") == prompts_of(http, text, 10, truncation_side=None)
    whole = answer(http, "/tokenize", messages=LONG)["tokens"]
    body = {"messages": LONG, "truncation_side": "right", "return_token_ids": True, "temperature": 0, "max_tokens": 7}
    for keeps, most in ((50, 50), (-1, CONTEXT - 7)):
        assert answer(http, CHAT, **body, truncate_prompt_tokens=keeps)["prompt_token_ids"] == whole[:most]


def test_half_a_character_at_the_end(tokenizer: Any) -> None:
    whole = read_prompt("Knots ⛵🙂 é.", tokenizer, with_text=True)
    halves = 0
    for most in range(1, len(whole.token_ids) + 1):
        found = first_tokens(whole, most, tokenizer)
        assert found.text == tokenizer.decode(found.token_ids, skip_special_tokens=True)
        assert len(found.token_ids) == len(found.starts) == most
        halves += found.text.endswith("\ufffd")
    assert halves >= 5


@pytest.mark.parametrize("bos", [0, None])
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_any_number_of_tokens(most: int, bos: int | None) -> None:
    found = last_tokens(Prompt([0, 7, 8, 9], "abc", [0, 0, 1, 2]), most, bos)
    texts = {1: "", 2: "c", 3: "bc", 4: "abc"} if bos == 0 else {1: "c", 2: "bc", 3: "abc", 4: "abc"}
    assert (len(found.token_ids), found.text) == (most, texts[most])
    assert found.token_ids[0] == (0 if bos == 0 or most == 4 else [0, 7, 8, 9][-most])
    assert len(found.starts) == most
    assert found.starts[0] == 0


def test_as_many_as_fit(http: httpx.Client) -> None:
    whole = answer(http, "/tokenize", messages=LONG)["tokens"]
    assert len(whole) > CONTEXT
    body = {"messages": LONG, "truncate_prompt_tokens": -1, "return_token_ids": True, "temperature": 0}
    limited = answer(http, CHAT, **body, max_tokens=7)
    assert limited["prompt_token_ids"] == whole[-(CONTEXT - 7) :]
    free = answer(http, CHAT, **body, stop=["e"])
    assert free["prompt_token_ids"] == whole[-(CONTEXT - 1024) :], "the server gives 1,024 tokens, a quarter too"
    assert answer(http, CHAT, **body | {"truncate_prompt_tokens": 50}, max_tokens=2)["prompt_token_ids"] == whole[-50:]


def test_refusals(http: httpx.Client) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), (CHAT, {"messages": LONG})):
        for keeps in (0, -2, "4"):
            error = http.post(path, json={**body, "truncate_prompt_tokens": keeps}).json()["error"]
            assert error["param"] == "truncate_prompt_tokens"
        assert http.post(path, json={**body, "truncation_side": "top"}).json()["error"]["param"] == "truncation_side"
        error = http.post(path, json={**body, "truncation_side": "right"}).json()["error"]
        assert error["message"] == "truncation_side: only with truncate_prompt_tokens"
    assert http.post(CHAT, json={"messages": LONG}).json()["error"]["code"] == "context_length_exceeded"
    error = http.post("/v1/responses", json={"input": "a", "truncate_prompt_tokens": 4}).json()["error"]
    assert error["message"] == "truncate_prompt_tokens is not supported by this server; leave it out"
