"""Many clients at once, for a few seconds: the checks of the load benchmark, without its timings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.servers.load_clients import Tally, load
from benchmarks.servers.load_requests import Answer, Client, Drawing, Pool, ask_alone
from service.engine.engine import Engine
from service.errors import ApiError
from tests.service.conftest import TEXT
from tests.service.serving import serving

CLIENTS = 24
SECONDS = 2.0


def drawing(tokens: list[int], **sizes: int) -> Drawing:
    return Drawing(TEXT, tokens, **{"longest": 600, "most_new": 24, "scored": 300} | sizes)


@pytest.mark.slow
async def test_every_answer_in_a_crowd_is_that_of_the_request_alone(checkpoints: Path) -> None:
    with serving(checkpoints, cache_tokens=2048, max_queue=2) as (url, _):
        async with Client(url) as client:
            pool = await ask_alone(client, drawing(await client.tokenize(TEXT)), 24)
            tally = Tally()
            await load(url, pool, CLIENTS, SECONDS, tally, patience_s=120)
            state = await client.load()
        assert tally.problems() == pool.unequal == []
        assert tally.lost == 0
        assert tally.refused > 0
        assert len(tally.answers) > CLIENTS
        assert {asked.route for asked, _ in tally.answers} == {"generate", "completions", "perplexity"}
        for model in state.values():
            assert [model[name] for name in ("running", "waiting", "scoring", "slots_in_use", "restarts")] == [0] * 5
        scraped = (await asyncio.to_thread(httpx.get, f"{url}/metrics")).text
        assert f'ropeway_requests_rejected_total{{reason="queue_full"}} {tally.refused}.0' in scraped


# The checks find what they are there for


EXPECTED = Answer((5, 6, 7), "abc", "length", 4, 3)


def test_equal_answers_differ_in_nothing_but_time() -> None:
    assert EXPECTED.difference(replace(EXPECTED, whole_s=1.0, first_s=0.5)) is None
    scores = Answer(nll=(100.0, 7.0))
    assert scores.difference(Answer(nll=(100.0 * (1 + 1e-6), 7.0))) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(EXPECTED, tokens=(5, 9, 7)), "token 1 is 9 in place of 6"),
        (replace(EXPECTED, tokens=(5, 6)), "usage counts 3 new tokens and there are 2"),
        (replace(EXPECTED, tokens=(5, 6, 6, 7)), "usage counts 3 new tokens and there are 4"),
        (replace(EXPECTED, tokens=(5, 6), completion_tokens=2), "2 tokens of 3"),
        (replace(EXPECTED, text="ab"), "text or counts differ"),
        (replace(EXPECTED, prompt_tokens=5), "prompt 5"),
        (replace(EXPECTED, finish_reason="stop"), "stop"),
        (replace(EXPECTED, nll=(1.0,)), "NLL"),
    ],
    ids=range(8),
)
def test_what_differs_is_said(wrong: Answer, said: str) -> None:
    assert said in str(EXPECTED.difference(wrong))


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, Pool]]:
    """A server, and a few requests with the answers that they got alone."""

    async def ask(url: str) -> Pool:
        async with Client(url) as client:
            return await ask_alone(client, drawing(await client.tokenize(TEXT), longest=60), 8)

    with serving(checkpoints) as (url, _):
        yield url, asyncio.run(ask(url))


async def found(served: tuple[str, Pool], patience_s: float = 30) -> Tally:
    """Findings of a short load."""
    tally = Tally()
    await load(*served, 4, 0.5, tally, patience_s)
    return tally


async def test_nothing_is_found_where_nothing_is_wrong(served: tuple[str, Pool]) -> None:
    tally = await found(served)
    assert (tally.problems(), tally.lost, len(tally.answers)) == ([], 0, tally.asked)


async def test_a_lost_token_is_found(served: tuple[str, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Engine.generate

    async def loses_the_last(*args: Any, **options: Any) -> AsyncGenerator[Any]:
        async for generation in whole(*args, **options):
            if generation.finish_reason is not None:
                generation.token_ids = generation.token_ids[:-1]
            yield generation

    monkeypatch.setattr(Engine, "generate", loses_the_last)
    tally = await found(served)
    assert tally.unequal.total() == len(tally.answers) > 0


async def test_errors_count_in_answers_and_in_streams(
    served: tuple[str, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        raise ApiError(503, "broken")

    monkeypatch.setattr(Engine, "generate", breaks)
    tally = await found(served)
    assert tally.failures.total() == tally.asked > 0
    assert tally.answers == []
    assert all("broken" in what for what in tally.failures)


async def test_an_answer_that_never_comes_is_lost(served: tuple[str, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        await asyncio.sleep(600)
        yield

    monkeypatch.setattr(Engine, "generate", hangs)
    tally = await found(served, patience_s=1)
    assert tally.lost == tally.asked == 4
