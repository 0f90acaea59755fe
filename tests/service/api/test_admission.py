"""Admission: checked and counted at once, bounded by requests and tokens, true sizes in place of bounds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from limits.aio.storage import memory

from service.api.quotas import RATE_HEADERS, TokenRate, upper_bound
from service.errors import ApiError
from service.sharing.admission import Admission, QueueFull, TooLarge
from tests.service.conftest import tiny_tokenizer
from tests.service.serving import engine_of, serving, within_a_minute


async def test_first_come_and_a_waiter_may_leave() -> None:
    admission = Admission(capacity=10, max_waiting=3, unit=2)
    (held,) = admission.enter([9])
    (first,), (second,), (third,) = (admission.enter([n]) for n in (10, 2, 2))
    assert (held.granted.is_set(), admission.reserved, admission.waiting) == (True, 10, 3)
    first.leave()
    first.leave()
    assert not second.granted.is_set()
    held.leave()
    assert second.granted.is_set()
    assert third.granted.is_set()
    second.leave()
    third.leave()
    assert (admission.reserved, admission.waiting) == (0, 0)


async def test_the_queue_is_bounded_by_requests_and_not_by_their_sequences() -> None:
    admission = Admission(capacity=4, max_waiting=2)
    admission.enter([4])
    admission.enter([1] * 64)
    admission.enter([1])
    with pytest.raises(QueueFull, match="2 requests"):
        admission.enter([1])
    assert admission.waiting == 65


async def test_the_queue_is_bounded_by_tokens() -> None:
    admission = Admission(capacity=8, max_waiting=100, max_waiting_tokens=10)
    admission.enter([8])
    (large,) = admission.enter([8])
    admission.enter([2])
    with pytest.raises(QueueFull, match="10 tokens"):
        admission.enter([1])
    large.leave()
    admission.enter([8])
    assert admission.waiting == 2


async def test_who_finds_the_queue_empty_may_wait_however_large() -> None:
    admission = Admission(capacity=8, max_waiting=1, max_waiting_tokens=4)
    admission.enter([8])
    (ticket,) = admission.enter([8])
    assert not ticket.granted.is_set()


async def test_true_sizes_replace_bounds() -> None:
    admission = Admission(capacity=10, max_waiting=5)
    (one,) = admission.enter([1000])
    (two,) = admission.enter([5])
    assert (admission.reserved, two.granted.is_set()) == (10, False)
    one.resize(4)
    assert (admission.reserved, two.granted.is_set()) == (9, True)
    one.resize(6)  # the bound was none: it waits at the head of the queue for what is missing
    assert not one.granted.is_set()
    (three,) = admission.enter([1])
    assert not three.granted.is_set()
    two.leave()
    assert one.granted.is_set()
    assert three.granted.is_set()
    with pytest.raises(TooLarge):
        one.resize(11)
    for ticket in (one, three):
        ticket.leave()
    assert admission.reserved == 0


@given(st.text(min_size=1, max_size=60))
def test_the_bound_holds_for_byte_level_tokenizers(text: str) -> None:
    tokenizer = tiny_tokenizer_once()
    assert upper_bound(text, 10_000) >= len(tokenizer(text)["input_ids"])


@cache
def tiny_tokenizer_once() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def narrow(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    """Room for one long request, and for one waiting."""
    with serving(checkpoints, max_queue=1, cache_tokens=512, score_tokens=512) as server:
        yield server


@pytest.mark.slow
def test_twelve_requests_at_a_queue_of_one_are_all_answered(narrow: tuple[str, FastAPI]) -> None:
    url, app = narrow
    body = {"prompt": [5, 6, 7], "max_new_tokens": 400}

    def send(_: int) -> httpx.Response:
        return httpx.post(f"{url}/generate", json=body, timeout=120)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(send, range(12)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == 12
    assert len(served) >= 2
    assert len(refused) >= 1
    assert len({tuple(answer.json()["results"][0]["token_ids"]) for answer in served}) == 1
    for answer in refused:
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
    engine = engine_of(app)
    assert (engine.generations.reserved, engine.generations.waiting) == (0, 0)


def test_a_refused_request_was_not_tokenized(narrow: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch) -> None:
    url, app = narrow
    served = app.state.models.default
    tokenized: list[object] = []
    monkeypatch.setattr(served, "tokenizer", lambda text, **_: tokenized.append(text))
    held = [ticket for _ in range(2) for ticket in served.engine.generations.enter([512])]
    scored = [ticket for _ in range(2) for ticket in served.engine.scores.enter([512])]
    try:
        for route, body in (("/generate", {"prompt": "some text"}), ("/perplexity", {"input": "some text"})):
            assert httpx.post(f"{url}{route}", json=body).status_code == 429
        assert tokenized == []
    finally:
        for ticket in held + scored:
            ticket.leave()


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(narrow: tuple[str, FastAPI]) -> None:
    url, _ = narrow
    for stream in (False, True):
        answer = httpx.post(f"{url}/generate", json={"prompt": [5] * 500, "max_new_tokens": 100, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (500, 512)
        assert "maximum context length is 512 tokens" in error["message"]
        assert "exceeds the available context size" in error["message"]
        assert error["message"].endswith(". Longer requests need a larger ROPEWAY_CACHE_TOKENS on this server")


def rate_of(answer: httpx.Response) -> tuple[int, int, int]:
    """Tokens a minute of the key, those left, and seconds until all are."""
    limit, remaining, reset = (answer.headers[name] for name in RATE_HEADERS)
    assert reset.endswith("s")
    return int(limit), int(remaining), int(reset[:-1])


def test_a_minute_holds_so_many_tokens(checkpoints: Path) -> None:
    with serving(checkpoints, key_tokens_per_minute=100) as (url, _):
        within_a_minute(10)
        body = {"prompt": [5] * 20, "max_new_tokens": 20, "ignore_eos": True}
        answers = [httpx.post(f"{url}/generate", json=body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [rate_of(answer)[:2] for answer in answers] == [(100, 60), (100, 20)]
        answer = httpx.post(f"{url}/generate", json=body)
        assert rate_of(answer)[:2] == (100, 20)
        assert 60 < rate_of(answer)[2] <= 120
        assert "x-ratelimit-limit-tokens" not in httpx.get(f"{url}/models").headers
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "token_rate_exceeded")
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        never = httpx.post(f"{url}/generate", json=body | {"max_new_tokens": 100})
        error = never.json()["error"]
        assert (never.status_code, error["code"], error["param"]) == (400, "token_rate_exceeded", "max_new_tokens")
        assert error["message"].startswith("max_new_tokens: the request asks for 120 tokens and this API key may ask")
        assert httpx.post(f"{url}/perplexity", json={"input": [5] * 90, "lengths": [80]}).status_code == 429


AT_ONCE: dict[str, Any] = {"stop_token_ids": [7], "logit_bias": {"7": 100}}
"""The first token of an answer ends it."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_gets_back_what_its_answers_did_not_use(checkpoints: Path, stream: bool) -> None:
    with serving(checkpoints, key_tokens_per_minute=450) as (url, _):
        within_a_minute(20)
        body = {"prompt": [5] * 20, "max_new_tokens": 200, "stream": stream, **AT_ONCE}
        for _ in range(11):
            assert httpx.post(f"{url}/generate", json=body).status_code == 200
        assert httpx.post(f"{url}/generate", json=body).status_code == 429, (
            "room is for eleven prompts, and one whole answer"
        )


def test_a_chat_without_max_tokens_asks_for_what_its_key_may(checkpoints: Path) -> None:
    with serving(checkpoints, key_tokens_per_minute=90, api_keys="ann,bob,cem,dan,eve", chat_template="plain") as (
        url,
        _,
    ):
        within_a_minute(20)

        def asked(key: str, text: str = "Hi", **more: Any) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": text}], "ignore_eos": True, **more}
            headers = {"x-api-key": key}
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)

        for _ in range(3):
            usage = asked("ann", **AT_ONCE).json()["usage"]
            assert usage["completion_tokens"] == 1, "the key gets back the rest of its minute"
        usage = asked("ann").json()["usage"]
        assert usage["total_tokens"] == 90 - 3 * (usage["prompt_tokens"] + 1), "it asks for all that is left"
        refused = asked("ann")
        dynamic = [asked("dan", pe="dynamic", **AT_ONCE).json()["choices"][0]["pe"] for _ in range(2)]
        assert dynamic[0] == dynamic[1], "an encoding does not depend on the tokens that are left"
        few = [asked("eve", text="ro" * 20, min_tokens=20, **AT_ONCE).status_code for _ in range(3)]
        assert set(few) <= {200, 429}
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_rate_exceeded")
        usage = asked("bob", n=3).json()["usage"]
        assert 88 <= usage["total_tokens"] <= 90, "three answers share what is left"
        for field in ("max_tokens", "max_completion_tokens"):
            too_many: dict[str, Any] = {field: 100}
            refused = asked("cem", **too_many)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        refused = asked("cem", text="rope " * 90)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


class Clock:
    """Seconds of the limiter's clock."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


async def refused_for(rate: TokenRate, tokens: int, *, known: bool = True) -> int:
    """Seconds after which a refused request may come again; ``known`` when its tokens are."""
    with pytest.raises(ApiError) as refusal:
        await (rate.charge(tokens) if known else rate.check(tokens))
    assert refusal.value.status == 429
    return int(refusal.value.headers["Retry-After"])


@pytest.mark.parametrize("begun", [0.0, 13.5, 59.5])
@pytest.mark.parametrize("used", [[900], [700, 200], [500, 500]])
@pytest.mark.parametrize("tokens", [150, 950, 1000])
async def test_a_refused_request_fits_after_its_wait_and_no_sooner(
    begun: float, used: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(6000.0 + begun)
    monkeypatch.setattr(memory, "time", clock)
    rate = TokenRate(1000)
    for cost in used:
        await rate.charge(cost)
        clock.now += 0.2
    wait = await refused_for(rate, tokens)
    clock.now += wait - 1.1
    assert await refused_for(rate, tokens) <= 2
    clock.now += 1.1
    await rate.charge(tokens)


async def test_a_minute_used_up_names_the_wait_of_the_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(6000.0)
    monkeypatch.setattr(memory, "time", clock)
    rate = TokenRate(1000)
    await rate.charge(1000)
    waits = [await refused_for(rate, 600, known=known) for known in (True, False)]
    assert waits[0] == waits[1] > 60
