"""Penalties, biases and stop tokens on every route that generates, against transformers' own generation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch

from service.api.generation.prompts import check_scored
from service.api.openai.schemas import CompletionRequest
from service.errors import ApiError
from tests.service.openai.conftest import ENDS, answer, chunks, plain, plain_logprobs

NEW = 24
CHAT = {"messages": [{"role": "user", "content": "a rope and a rope"}]}


def greedy(tiny: Path, prompt: list[int], **options: Any) -> list[int]:
    """Tokens of ``generate`` of transformers."""
    output = plain(tiny).generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return list(output[0, len(prompt) :].tolist())


def by_counts(tiny: Path, prompt: list[int], frequency: float, presence: float) -> list[int]:
    """Greedy tokens from whole passes, where tokens of the answer lose by how often they have come."""
    ids = list(prompt)
    for _ in range(NEW):
        row = plain_logprobs(tiny, ids)[-1].clone()
        for token in set(ids[len(prompt) :]):
            row[token] -= frequency * ids[len(prompt) :].count(token) + presence
        ids.append(int(row.argmax()))
    return ids[len(prompt) :]


def generate(http: httpx.Client, prompt: list[int], **body: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_new_tokens": NEW, "ignore_eos": True, **body}
    result: dict[str, Any] = answer(http, "/generate", **asked)["results"][0]
    return result


@pytest.mark.parametrize("prompt", [[5, 9, 9, 14, 40], [30, 31, 32]])
def test_repetition_penalty_is_that_of_transformers(http: httpx.Client, tiny: Path, prompt: list[int]) -> None:
    free = generate(http, prompt)["token_ids"]
    for penalty in (0.9, 1.1, 1.8):
        expected = greedy(tiny, prompt, repetition_penalty=penalty)
        assert generate(http, prompt, repetition_penalty=penalty)["token_ids"] == expected
        assert expected != free or penalty != 1.8


@pytest.mark.parametrize(("frequency", "presence"), [(0.4, 0.0), (0.0, 1.2), (2.0, 2.0), (-1.0, 0.5)])
def test_penalties_count_the_answer(http: httpx.Client, tiny: Path, frequency: float, presence: float) -> None:
    prompt = [5, 9, 9, 14, 40]
    expected = by_counts(tiny, prompt, frequency, presence)
    asked = {"frequency_penalty": frequency, "presence_penalty": presence}
    assert generate(http, prompt, **asked)["token_ids"] == expected


def test_the_client_of_openai_sets_them(url: str, tiny: Path, tokenizer: Any) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "prompt": [5, 9, 9, 14, 40],
            "max_tokens": NEW,
        }
        extra = {"ignore_eos": True}
        found = client.completions.create(**asked, temperature=0, frequency_penalty=0.4, extra_body=extra)
        assert found.choices[0].text == tokenizer.decode(
            by_counts(tiny, asked["prompt"], 0.4, 0.0), skip_special_tokens=True
        )
        forced = client.completions.create(**asked, temperature=1, logit_bias={"33": 100}, extra_body=extra)
        assert forced.choices[0].text == tokenizer.decode([33] * NEW, skip_special_tokens=True)


def test_min_p_of_one_is_greedy(http: httpx.Client) -> None:
    drawn = generate(http, [30, 31, 32], temperature=3.0, min_p=1.0)["token_ids"]
    assert drawn == generate(http, [30, 31, 32])["token_ids"]
    assert drawn != generate(http, [30, 31, 32], temperature=3.0, seed=1)["token_ids"]


async def test_requests_of_one_batch_have_each_its_own(url: str, tiny: Path) -> None:
    prompt, penalties = [5, 9, 9, 14, 40], (1.0, 1.1, 1.8, 3.0)
    body = {"prompt": prompt, "max_new_tokens": NEW, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        asked = [client.post("/generate", json={**body, "repetition_penalty": penalty}) for penalty in penalties]
        found = [reply.json()["results"][0]["token_ids"] for reply in await asyncio.gather(*asked)]
    assert found == [greedy(tiny, prompt, repetition_penalty=penalty) for penalty in penalties]


class TestStopTokens:
    def test_a_token_ends_the_answer_without_its_text(self, http: httpx.Client, tokenizer: Any) -> None:
        prompt = [30, 31, 32]
        free = generate(http, prompt)["token_ids"]
        at = next(at for at in range(3, NEW) if free[at] not in free[:at] and tokenizer.decode([free[at]]).strip())
        ended = generate(http, prompt, stop_token_ids=[free[at], 299])
        assert (ended["token_ids"], ended["finish_reason"]) == (free[: at + 1], "stop")
        assert ended["text"] == tokenizer.decode(free[:at], skip_special_tokens=True)
        body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        whole = answer(http, **body, stop_token_ids=[free[at]])
        choice = whole["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (ended["text"], "stop")
        assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == at + 1
        kept = answer(http, **body, stop_token_ids=[free[at]], include_stop_str_in_output=True)["choices"][0]
        assert (kept["text"], kept["finish_reason"]) == (tokenizer.decode(free[: at + 1]), "stop")
        assert kept["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
        pieces = [chunk["choices"][0] for chunk in chunks(http, **body, stop_token_ids=[free[at]])]
        assert "".join(piece["text"] for piece in pieces) == ended["text"]
        assert pieces[-1]["finish_reason"] == "stop"

    def test_a_token_in_a_chat(self, http: httpx.Client) -> None:
        prompt = answer(http, "/tokenize", **CHAT)["tokens"]
        first = generate(http, prompt)["token_ids"][0]
        body = {**CHAT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
        ended = answer(http, "/v1/chat/completions", **body, stop_token_ids=[first])
        assert (ended["choices"][0]["message"]["content"], ended["choices"][0]["finish_reason"]) == ("", "stop")
        assert ended["usage"]["completion_tokens"] == 1

    def test_a_limit_that_is_reached_with_another_token_says_nothing(self, http: httpx.Client) -> None:
        free = generate(http, [30, 31, 32])
        unused = next(token for token in range(3, 300) if token not in free["token_ids"])
        assert generate(http, [30, 31, 32], stop_token_ids=[unused])["text"] == free["text"]


def test_the_token_of_scoring_is_drawn_where_something_changes_it(http: httpx.Client, tiny: Path) -> None:
    body: dict[str, Any] = {"prompt": ENDS, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    best = int(plain_logprobs(tiny, ENDS)[-1].argmax())

    def last(**changes: Any) -> tuple[str, str]:
        choice = answer(http, **body, ignore_eos=True, **changes)["choices"][0]
        return choice["logprobs"]["tokens"][-1], choice["finish_reason"]

    assert last(logit_bias={str(best): -100})[0] != last()[0]
    assert last(stop_token_ids=[best])[1] == "stop"
    assert last(allowed_token_ids=[7])[0] == last(logit_bias={"7": 100})[0] != last()[0]
    assert last(bad_words=[last()[0]])[0] != last()[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids: needs at least 1 entry"),
        ({"allowed_token_ids": [5, 999999]}, "allowed_token_ids: token ids of this model are 0..383"),
        ({"allowed_token_ids": [5] * 16385}, "allowed_token_ids: may have at most 16384 entries"),
        ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids: with min_tokens"),
        ({"logit_bias": {str(token): 1 for token in range(257)}}, "logit_bias: an object may have at most 256 keys"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_refusals_name_the_field(http: httpx.Client, path: str, fields: dict[str, Any], named: str) -> None:
    prompt: dict[str, Any] = CHAT if "chat" in path else {"prompt": "a"}
    reply = http.post(path, json={**prompt, **fields})
    assert reply.status_code == 400, reply.text
    assert named in reply.json()["error"]["message"]


def test_as_many_biases_as_documented(http: httpx.Client) -> None:
    most = CompletionRequest.model_json_schema()["properties"]["logit_bias"]["maxProperties"]
    biases = {str(token): -100 for token in range(most)}
    drawn = generate(http, [30, 31, 32], logit_bias=biases)["token_ids"]
    assert min(drawn) >= most


def test_the_smallest_temperature_is_greedy(http: httpx.Client) -> None:
    """Quotients by it would be no numbers, and would fail the step of all others."""
    free = generate(http, [30, 31, 32])["token_ids"]
    assert generate(http, [30, 31, 32], temperature=1e-46, top_p=0.9)["token_ids"] == free


def test_a_token_must_be_left_to_draw() -> None:
    served = SimpleNamespace(patch=SimpleNamespace(num_logits=3), engine=SimpleNamespace(eos_token_ids=(2,)))
    CompletionRequest(prompt="a", min_tokens=1, stop_token_ids=[0]).check_tokens(served)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="must leave a token to draw"):
        CompletionRequest(prompt="a", min_tokens=1, stop_token_ids=[0, 1]).check_tokens(served)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [{"logit_bias": {"3": 1}}, {"min_tokens": 1, "stop_token_ids": [3]}], ids=str)
def test_a_row_of_embeddings_without_a_logit_is_no_token(field: dict[str, Any]) -> None:
    """Moshi has one more row than logits. Such a token would end the generation thread."""
    served = SimpleNamespace(
        vocab_size=4, patch=SimpleNamespace(num_logits=3), engine=SimpleNamespace(eos_token_ids=())
    )
    with pytest.raises(ApiError, match=r"token ids of this model are 0\.\.2"):
        CompletionRequest(prompt="a", **field).check_tokens(served)  # type: ignore[arg-type]


def test_a_token_without_a_logit_has_no_score() -> None:
    """The first token of a prompt needs none."""
    scores = SimpleNamespace(most=4)
    served: Any = SimpleNamespace(patch=SimpleNamespace(num_logits=3), engine=SimpleNamespace(scores=scores))
    check_scored([3, 1, 2], served, "prompt")
    with pytest.raises(ApiError, match=r"prompt: this model gives scores to token ids 0\.\.2 only") as refused:
        check_scored([1, 3, 2], served, "prompt")
    assert refused.value.param == "prompt"
    with pytest.raises(ApiError, match=r"length is 4 tokens.*ROPEWAY_SCORE_TOKENS on this server"):
        check_scored([1] * 5, served, "prompt")
