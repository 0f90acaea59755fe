"""The engine without HTTP: admission, interleaving, restarts, the sampler."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from patches import parse, patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.engine import Engine
from service.engine.failures import EngineFailed, EngineStopping
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from service.engine.thread import generation_thread
from service.engine.thread.interleave import Interleaved
from service.sharing.admission import QueueFull, TooLarge
from tests.service.engine.generating import DEFAULT, finished
from tests.service.serving import wait_for

LIMITS = EngineLimits(cache_tokens=2048, score_tokens=1024, max_batch_tokens=64, max_queue=4)


@asynccontextmanager
async def running(
    checkpoints: Path, limits: EngineLimits = LIMITS, choice: EngineChoice = PAGED
) -> AsyncIterator[Engine]:
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny").eval()
    with patched(model) as patch:
        engine = Engine(patch, limits, eos_token_ids=(), choice=choice)
        try:
            yield engine
        finally:
            engine.thread.stop(grace_s=1.0)


async def test_a_request_that_never_fits_is_refused_at_once(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        with pytest.raises(TooLarge, match="2048"):
            await finished(engine, [2] * 2000, 100)


async def test_what_does_not_fit_now_waits_and_the_queue_is_bounded(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        jobs = [asyncio.create_task(finished(engine, [2] * 900, 100)) for _ in range(6)]  # two fit, four wait
        await asyncio.sleep(0)
        assert (engine.generations.reserved, engine.generations.waiting) == (2048, 4)
        with pytest.raises(QueueFull):
            await finished(engine, [2], 1)
        results = await asyncio.gather(*jobs)
        assert [len(r.token_ids) for r in results] == [100] * 6
        assert len({tuple(r.token_ids) for r in results}) == 1
        assert engine.generations.reserved == 0


async def test_long_prompts_prefill_in_chunks_like_in_one(checkpoints: Path) -> None:
    pe = parse({"method": "self_extend", "group_size": 4, "neighbor_window": 16})
    prompt = [(7 * n) % 380 + 2 for n in range(500)]
    async with running(checkpoints) as engine:
        chunked = await finished(engine, prompt, 8, pe)
    async with running(checkpoints, EngineLimits(2048, 1024, max_batch_tokens=1024)) as engine:
        whole = await finished(engine, prompt, 8, pe)
    assert chunked.token_ids == whole.token_ids


async def test_the_tokens_are_those_of_generate(checkpoints: Path) -> None:
    """The service and the library: a paged cache, and one padded batch of transformers' own loop."""
    encodings = ["default", "dynamic_yarn", "self_extend:group_size=4,neighbor_window=16"]
    prompts = [[(7 * n) % 380 + 2 for n in range(length)] for length in (300, 90, 20)]
    async with running(checkpoints) as engine:
        expected = [await finished(engine, *pair) for pair in zip(prompts, [8] * 3, map(parse, encodings), strict=True)]
    longest = max(map(len, prompts))
    ids, mask = (
        torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny").eval()
    with patched(model) as patch:
        chosen = patch.encoding(encodings, length=mask.sum(1) + 8)
        endless: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        result = model.generate(ids, attention_mask=mask, **endless, **chosen)
    assert result[:, -8:].tolist() == [generation.token_ids for generation in expected]


async def test_a_shared_prefix_is_reused_under_one_encoding_only(checkpoints: Path) -> None:
    prompt = [(5 * n) % 380 + 2 for n in range(200)]
    async with running(checkpoints) as engine:
        found: list[int] = []
        await finished(engine, prompt, 2)
        cache: Any = engine.thread.manager.batch_processor.cache
        search = type(cache).search_prefix_match

        def spy(request_id: str, ids: list[int]) -> int:
            found.append(search(cache, request_id, ids))
            return found[-1]

        cache.search_prefix_match = spy
        await finished(engine, prompt, 2)
        await finished(engine, prompt, 2, parse({"method": "yarn", "factor": 4}))
        await finished(engine, prompt, 2, parse({"method": "yarn", "factor": 4}))
    assert found == [192, 0, 192]


async def test_scoring_runs_between_steps_and_can_be_cancelled(checkpoints: Path) -> None:
    closed = []

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    async with running(checkpoints) as engine:
        job = asyncio.create_task(engine.score(endless(), 100, lambda progress: None, scored={}))
        generation = await finished(engine, [2, 3, 4], 20)
        assert len(generation.token_ids) == 20
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await finished(engine, [2], 3)
        assert closed == [True]
        assert engine.scores.reserved == 0


async def test_a_failing_job_fails_alone(checkpoints: Path) -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise FloatingPointError("this one only")

    async with running(checkpoints) as engine:
        with pytest.raises(FloatingPointError):
            await engine.score(broken(), 10, lambda progress: None, scored={})
        assert len((await finished(engine, [2], 3)).token_ids) == 3


async def test_a_dead_thread_fails_what_ran_and_comes_back(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        before = await finished(engine, [2, 3, 4], 6)
        runner: Any = engine.thread.manager.batch_processor.model_runner

        def explode(*_: object) -> None:
            raise ArithmeticError("a broken step")

        runner._sample = explode
        with pytest.raises(EngineFailed, match="a broken step"):
            await finished(engine, [2, 3, 4], 6)
        while engine.thread.is_alive and not engine.thread.restarts:  # a check that was under way may replace it first
            await asyncio.sleep(0.01)
        engine.thread.revive()
        assert engine.thread.is_alive
        after = await finished(engine, [2, 3, 4], 6)
        assert after.token_ids == before.token_ids
        assert engine.thread.restarts == 1
        assert engine.generations.reserved == 0
        assert engine.patch.slots.in_use() == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_thread_that_ends_without_a_word_is_noticed(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        await finished(engine, [2], 1)
        engine.thread.manager._generation_step = lambda: sys.exit(0)  # type: ignore[method-assign]
        with pytest.raises(EngineFailed, match="has stopped"):
            await finished(engine, [2, 3], 4)
        assert len((await finished(engine, [2, 3], 4)).token_ids) == 4


async def test_a_stopped_engine_refuses(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        await finished(engine, [2], 1)
        engine.thread.stop(0.0)
        assert not engine.thread.is_alive
        with pytest.raises(EngineFailed, match="shutting down"):
            await finished(engine, [2], 1)


def test_interleaved_work_takes_turns_and_fails_when_closed() -> None:
    seen: list[str] = []

    def count(name: str) -> Generator[str, None, str]:
        for n in range(2):
            yield f"{name}{n}"
        return name

    work = Interleaved(lambda: False)
    one, two = work.submit(count("a"), seen.append, ""), work.submit(count("b"), seen.append, "")
    while work.advance(""):
        pass
    assert seen == ["a0", "b0", "a1", "b1"]
    assert (one.result(), two.result()) == ("a", "b")
    late = work.submit(count("c"), seen.append, "")
    work.close(RuntimeError("gone"))
    assert isinstance(late.exception(), RuntimeError)
    assert isinstance(work.submit(count("d"), seen.append, "").exception(), RuntimeError)


def test_work_fails_with_what_comes_before_its_step() -> None:
    def fails() -> None:
        raise RuntimeError("the device is lost")

    def one() -> Generator[str, None, None]:
        yield "a"

    work = Interleaved(lambda: False, before_step=fails)
    future = work.submit(one(), lambda _: None, "")
    assert work.advance("")
    with pytest.raises(RuntimeError, match="the device is lost"):
        future.result(timeout=0)
    assert not len(work)


def test_work_counts_while_it_is_in_a_step() -> None:
    counts: list[int] = []

    def counted() -> Generator[str, None, None]:
        counts.append(len(work))
        yield "a"
        counts.append(len(work))

    work = Interleaved(lambda: False)
    one = work.submit(counted(), lambda _: counts.append(len(work)), "")
    one.add_done_callback(lambda _: counts.append(len(work)))
    while work.advance(""):
        counts.append(len(work))
    assert counts == [1, 1, 1, 1, 0, 0]


async def test_a_step_that_outlives_the_grace_ends_without_an_error(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(checkpoints) as engine:
        manager: Any = engine.thread.manager
        step, inside = manager._generation_step, asyncio.Event()
        loop = asyncio.get_running_loop()

        def outlives_the_grace() -> None:
            loop.call_soon_threadsafe(inside.set)
            wait_for(lambda: manager.batch_processor is None)  # the manager forgets it when the grace is over
            step()

        monkeypatch.setattr(manager, "_generation_step", outlives_the_grace)
        generating = asyncio.create_task(finished(engine, [2, 3], 500))
        await inside.wait()
        await asyncio.to_thread(engine.thread.stop, 0.1)
        with pytest.raises(EngineStopping):
            await generating
        assert not manager.is_running()
        assert manager.fatal_error() is None


async def test_outputs_of_cancelled_requests_do_not_stay(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        for n in range(20):
            resolved = engine.patch.resolve(DEFAULT, 500)
            steps = engine.generate([2 + n] * 300, resolved, SamplingParams(), 200, pe_method="default")
            async for _ in steps:
                break
            await steps.aclose()
        await finished(engine, [2, 3], 1)
        manager: Any = engine.thread.manager
        assert manager.output_router.output_queue.empty()
        assert not manager.output_router.result_handlers


@pytest.mark.parametrize("choice", [PAGED, EngineChoice("padded")], ids=str)
async def test_a_thread_that_stays_stuck_ends_its_generations_at_the_stop(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, choice: EngineChoice
) -> None:
    monkeypatch.setattr(generation_thread, "STOP_S", 0.2)
    release, inside, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    async with running(checkpoints, choice=choice) as engine:
        await finished(engine, [2], 1)
        forward = engine.patch.model.forward

        def stuck(*args: Any, **kwargs: Any) -> Any:
            loop.call_soon_threadsafe(inside.set)
            release.wait(30)
            return forward(*args, **kwargs)

        monkeypatch.setattr(engine.patch.model, "forward", stuck)
        generating = asyncio.create_task(finished(engine, [2, 3], 500))
        try:
            await inside.wait()
            await asyncio.to_thread(engine.thread.stop, 0.0)
            with pytest.raises(EngineStopping):
                await asyncio.wait_for(generating, 10)
        finally:
            release.set()


async def test_a_request_that_comes_as_the_thread_stops_is_refused(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(checkpoints) as engine:
        manager: Any = engine.thread.manager
        register = manager.register_result_handler

        def stops(*args: Any) -> None:
            register(*args)
            stopping = threading.Thread(target=engine.thread.stop, args=(0.0,))
            stopping.start()
            stopping.join()

        monkeypatch.setattr(manager, "register_result_handler", stops)
        with pytest.raises(EngineStopping):
            await asyncio.wait_for(finished(engine, [2, 3], 4), 10)
        assert engine.generations.reserved == 0


def test_values_of_finished_work_do_not_stay() -> None:
    class Value:
        pass

    def one() -> Generator[str, None, Value]:
        yield "a"
        return Value()

    work = Interleaved(lambda: False)
    future = work.submit(one(), lambda _: None, "")
    while work.advance(""):
        pass
    value = weakref.ref(future.result())
    del future
    gc.collect()
    assert value() is None
