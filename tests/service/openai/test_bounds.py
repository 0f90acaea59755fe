"""``allowed_token_ids`` and ``bad_words`` of vLLM, on every route that generates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from service.api.generation.bad_words import sequences
from service.api.openai.schemas import CompletionRequest
from service.errors import ApiError
from tests.service.openai.conftest import answer, plain_logprobs
from tests.service.openai.test_drawing import CHAT, NEW, generate


def allowed_greedy(tiny: Path, prompt: list[int], allowed: list[int]) -> list[int]:
    """Greedy tokens from whole passes, of those that are ``allowed``."""
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(max(allowed, key=lambda token: float(plain_logprobs(tiny, ids)[-1][token])))
    return ids[len(prompt) :]


class TestAllowedTokens:
    def test_no_others_are_drawn(self, http: httpx.Client, tiny: Path) -> None:
        prompt, allowed = [5, 9, 9, 14, 40], [30, 77, 112, 250]
        expected = allowed_greedy(tiny, prompt, allowed)
        assert generate(http, prompt, allowed_token_ids=allowed)["token_ids"] == expected
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "return_token_ids": True}
        (choice,) = answer(http, **body, allowed_token_ids=allowed, logprobs=1)["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (expected, "length"), "none of them ends an answer"
        row = plain_logprobs(tiny, prompt)[-1]
        assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(float(row[expected[0]]), abs=1e-4)
        drawn = generate(http, prompt, allowed_token_ids=allowed, temperature=5.0, seed=2, logprobs=0)["token_ids"]
        assert set(drawn) <= {*allowed}
        assert len({*drawn}) > 2
        chat = answer(http, "/v1/chat/completions", **CHAT, max_tokens=4, allowed_token_ids=[77], return_token_ids=True)
        assert chat["choices"][0]["token_ids"] == [77] * 4

    def test_within_a_form(self, http: httpx.Client, tokenizer: Any) -> None:
        tokens = tokenizer.convert_tokens_to_ids
        body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{3}"}}
        kept = answer(http, **body, allowed_token_ids=[tokens("b"), 1])["choices"][0]
        assert (kept["text"], kept["finish_reason"]) == ("bbb", "stop")
        reply = http.post("/v1/completions", json={**body, "allowed_token_ids": [tokens("c")]})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "grammar_failed")
        assert error["message"].endswith("leave no token that continues the answer")


class TestBadWords:
    def test_they_do_not_follow_in_sequence(self, http: httpx.Client, tokenizer: Any) -> None:
        prompt = [30, 31, 32]
        free = generate(http, prompt)["token_ids"]
        word = next(
            text
            for at in range(1, NEW - 2)
            if spelled(tokenizer, text := tokenizer.decode(free[at : at + 2])) == free[at : at + 2]
        )
        for path, fields in (("/generate", {"max_new_tokens": NEW}), ("/v1/completions", {"max_tokens": NEW})):
            asked = {"prompt": prompt, "ignore_eos": True, "temperature": 0, "bad_words": [word], **fields}
            found = answer(http, path, **asked)
            text = found["results"][0]["text"] if "results" in found else found["choices"][0]["text"]
            assert word in tokenizer.decode(free)
            assert word not in text
        bound = generate(http, prompt, bad_words=[word])["token_ids"]
        at = next(at for at in range(NEW) if bound[at] != free[at])
        assert free[at - 1 : at + 1] == spelled(tokenizer, word), "the last of its tokens is another one"
        assert generate(http, prompt, bad_words=[word, "never there"])["token_ids"] == bound

    def test_a_chat_has_none(self, http: httpx.Client) -> None:
        body = {**CHAT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        letters = [*"aeiou"]
        said = answer(http, "/v1/chat/completions", **body, bad_words=letters)["choices"][0]["message"]["content"]
        free = answer(http, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
        assert {*free} & {*letters}
        assert said != free

    async def test_company_changes_nothing(self, url: str) -> None:
        bodies: list[dict[str, Any]] = [{}, {"bad_words": ["e", "the"]}, {"allowed_token_ids": [*range(40, 90)]}]
        asked = {"prompt": [5, 9, 14], "max_new_tokens": NEW, "ignore_eos": True, "temperature": 1.0, "seed": 4}
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            alone = [(await client.post("/generate", json={**asked, **body})).json() for body in bodies]
            joint = [client.post("/generate", json={**asked, **body}) for body in bodies]
            together = [reply.json() for reply in await asyncio.gather(*joint)]
        tokens = [[each["results"][0]["token_ids"] for each in found] for found in (alone, together)]
        assert tokens[0] == tokens[1]
        assert len({tuple(each) for each in tokens[0]}) == len(bodies)

    @pytest.mark.parametrize(
        "words", [[""], ["a"] * 257, "a", ["a" * 257], ["ж" * 40]], ids=lambda words: f"{words}"[:9]
    )
    def test_bounds(self, http: httpx.Client, words: Any) -> None:
        error = http.post("/v1/completions", json={"prompt": "a", "bad_words": words}).json()["error"]
        assert error["param"].startswith("bad_words")

    def test_a_token_must_be_left(self, http: httpx.Client, tokenizer: Any) -> None:
        (letter,) = tokenizer("b", add_special_tokens=False)["input_ids"]
        body = {"bad_words": ["b"], "allowed_token_ids": [letter]}
        for path, fields, within in (
            ("/v1/completions", {"prompt": "a", **body}, ""),
            ("/generate", {"text": "a", "sampling_params": body}, "sampling_params."),
        ):
            reply = http.request("POST" if not within else "PUT", path, json=fields)
            assert reply.json()["error"]["param"] == f"{within}bad_words", reply.text


async def test_words_as_tokens() -> None:
    """A blank may add no tokens. A sequence with a token that has no logit is never drawn."""
    tokens = {"a": [3], " a": [3], "b": [4], " b": [], "c": [5, 9], " c": [6, 5], " ": [7], "  ": [7, 7], "": []}

    def tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": tokens[text]}

    patch, engine = SimpleNamespace(num_logits=9), SimpleNamespace(eos_token_ids=())
    served: Any = SimpleNamespace(tokenizer=tokenizer, patch=patch, engine=engine, name="tiny")
    body = CompletionRequest(prompt="x", bad_words=["a", " a", "b", "c", " "])
    assert await sequences(body, served) == ((3,), (4,), (6, 5), (7,), (7, 7))
    tokens["d"] = tokens[" d"] = []
    with pytest.raises(ApiError, match=r"bad_words\.1: the tokenizer of 'tiny' has no tokens for it"):
        await sequences(CompletionRequest(prompt="x", bad_words=["a", "d"]), served)


def spelled(tokenizer: Any, word: str) -> list[int]:
    return list(tokenizer(word, add_special_tokens=False)["input_ids"])
