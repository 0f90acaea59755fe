"""Blocks that are kept for their prefixes give way to requests one by one, and no request waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import pytest

from patches import patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from tests.models import VOCAB_SIZE, tiny_model
from tests.service.engine.generating import DEFAULT, finished

PAGE, PAGES = 32, 40
CHOICES = [PAGED, EngineChoice(attention="eager")]


@asynccontextmanager
async def running(choice: EngineChoice, family: str = "llama") -> AsyncIterator[Engine]:
    limits = EngineLimits(cache_tokens=PAGE * PAGES, score_tokens=64, max_batch_tokens=1024, page_size=PAGE)
    with patched(tiny_model(family)[1]) as patch:
        engine = Engine(patch, limits, (), choice=choice)
        try:
            yield engine
        finally:
            engine.thread.stop(1.0)


def prompt(pages: int, start: int) -> list[int]:
    """Texts of different starts share no page."""
    return [(start * 7 + 5 * n) % (VOCAB_SIZE - 3) + 3 for n in range(pages * PAGE)]


def allocator_of(engine: Engine) -> Any:
    return engine.thread.manager.batch_processor.cache.cache_allocators["full_attention"]  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_a_request_that_was_admitted_does_not_wait_for_others_to_end(choice: EngineChoice, family: str) -> None:
    """A long answer takes its pages late. Beside it, there is room for a prompt where prefixes are kept."""
    async with running(choice, family) as engine:
        await finished(engine, prompt(20, 1), 2)
        ended: list[str] = []

        async def noted(name: str, ids: list[int], tokens: int) -> None:
            await finished(engine, ids, tokens)
            ended.append(name)

        long = asyncio.create_task(noted("long", [3] * 10, 300))
        while not engine.load()["running"]:
            await asyncio.sleep(0.001)
        short = asyncio.create_task(noted("short", prompt(25, 2), 1))
        await asyncio.sleep(0)
        assert engine.generations.waiting == 0
        await asyncio.gather(long, short)
    assert ended == ["short", "long"]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
async def test_kept_blocks_are_not_in_use(choice: EngineChoice) -> None:
    async with running(choice) as engine:
        held: list[int] = []
        resolved = engine.patch.resolve(DEFAULT, 20 * PAGE + 4)
        for _ in range(2):
            steps = engine.generate(prompt(20, 1), resolved, SamplingParams(), 4, pe_method="default")
            held += [engine.load()["cache_tokens_used"] async for _ in steps]
            while engine.load()["running"]:
                await asyncio.sleep(0.001)
            assert len(allocator_of(engine).ledger.cached_blocks) == 20
            assert engine.load()["cache_tokens_used"] == 0
    assert 20 * PAGE <= max(held) <= PAGES * PAGE


async def test_kept_blocks_give_way_one_by_one_from_the_end_of_the_longest_unused() -> None:
    async with running(CHOICES[1]) as engine:
        for start in range(5):
            await finished(engine, prompt(8, start), 1)
        ledger = allocator_of(engine).ledger
        kept = list(ledger.cached_blocks)
        assert len(kept) == PAGES
        await finished(engine, [3, 4, 5], 1)
        assert list(ledger.cached_blocks) == kept[1:]
        await finished(engine, prompt(3, 9), 1)
        assert list(islice(ledger.cached_blocks, PAGES - 3)) == kept[3:], "a page was free"
        assert len(ledger.hash_to_block) == len(ledger.block_to_hash) == len(ledger.cached_blocks)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
async def test_answers_behind_prefixes_that_gave_way_are_the_same(choice: EngineChoice) -> None:
    texts = [prompt(9, start) for start in range(6)]
    async with running(choice) as engine:
        first = [(await finished(engine, ids, 12)).token_ids for ids in texts]
        again = [(await finished(engine, ids, 12)).token_ids for ids in texts]
        at_once = [each.token_ids for each in await asyncio.gather(*(finished(engine, ids, 12) for ids in texts))]
        allocator = allocator_of(engine)
        free, kept = len(allocator.pool._free_blocks[allocator.index]), len(allocator.ledger.cached_blocks)
        assert free + kept + allocator.pool.num_free_sectors * allocator.blocks_per_sector == PAGES
    assert first == again == at_once
