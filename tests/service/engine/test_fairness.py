"""Tenants share the generation thread, its memory and its slots: one cannot keep another waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from patches import Method, parse
from service import context
from service.context import RequestContext
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.limits import EngineLimits
from tests.service.engine.generating import DEFAULT, finished
from tests.service.engine.test_engine import running

LIMITS = EngineLimits(cache_tokens=4096, score_tokens=1024, max_batch_tokens=64, max_queue=200, shared=True)
LONG = [(7 * n) % 380 + 2 for n in range(400)]


async def finish(engine: Engine, tenant: str, prompt: list[int], tokens: int, method: Method = DEFAULT) -> Generation:
    context.enter(RequestContext("", tenant=tenant))
    return await finished(engine, prompt, tokens, method)


@pytest.mark.slow
async def test_a_short_request_does_not_wait_for_anothers_long_prompts(checkpoints: Path) -> None:
    async with running(checkpoints, LIMITS) as engine:
        alone = await finish(engine, "berta", [5, 6, 7], 8)
        long = [asyncio.create_task(finish(engine, "anna", [n, *LONG], 4)) for n in range(2, 66)]
        while engine.load()["running"] == 0:
            await asyncio.sleep(0.001)
        short = await finish(engine, "berta", [5, 6, 7], 8)
        assert short.token_ids == alone.token_ids
        assert sum(task.done() for task in long) <= 16  # 64 before tenants took turns
        assert all(len(found.token_ids) == 4 for found in await asyncio.gather(*long))


async def test_a_tenants_requests_come_in_their_order(checkpoints: Path) -> None:
    async with running(checkpoints, LIMITS) as engine:
        ended: list[int] = []

        async def one(number: int) -> None:
            await finish(engine, "anna", [number, *LONG], 2)
            ended.append(number)

        await asyncio.gather(*(one(number) for number in range(2, 14)))
        assert ended == sorted(ended)


@pytest.mark.slow
async def test_scoring_of_one_tenant_leaves_steps_to_another(checkpoints: Path) -> None:
    """Each step of the long work takes as long as some ten steps of decoding, also beside busy processes."""

    def work() -> Generator[int, None, str]:
        for _ in range(200):
            time.sleep(0.1)
            yield 1
        return "done"

    async with running(checkpoints, LIMITS) as engine:
        context.enter(RequestContext("", tenant="anna"))
        steps: list[int] = []
        scoring = asyncio.create_task(engine.score(work(), 10, steps.append, scored={}))
        while not steps:
            await asyncio.sleep(0.001)
        before = len(steps)
        await finish(engine, "berta", [5, 6, 7], 20)
        assert len(steps) - before < 12  # one a token before turns were kept
        scoring.cancel()


async def test_one_tenant_cannot_take_every_slot(checkpoints: Path) -> None:
    async with running(checkpoints, LIMITS) as engine:
        factors = [1.0 + number / 64 for number in range(126)]
        methods = [parse({"method": "linear", "factor": factor}) for factor in factors]
        many = [asyncio.create_task(finish(engine, "anna", [5, 6], 6, method)) for method in methods]
        await asyncio.sleep(0.05)
        other = [parse({"method": "ntk", "factor": 2.0 + number}) for number in range(8)]
        found = await asyncio.gather(*(finish(engine, "berta", [5, 6], 2, method) for method in other))
        assert [len(one.token_ids) for one in found] == [2] * 8
        assert [len(one.token_ids) for one in await asyncio.gather(*many)] == [6] * 126
        assert engine.load()["slots_in_use"] == 0


async def test_a_slot_is_waited_for(checkpoints: Path) -> None:
    """More encodings at once than there are slots, of one tenant without keys."""
    limits = EngineLimits(cache_tokens=8192, score_tokens=1024, max_batch_tokens=64, max_queue=400)
    async with running(checkpoints, limits) as engine:
        methods = [parse({"method": "linear", "factor": 1.0 + number / 64}) for number in range(1, 201)]
        found = await asyncio.gather(*(finish(engine, "anna", [5, 6], 2, method) for method in methods))
        assert [len(one.token_ids) for one in found] == [2] * 200
