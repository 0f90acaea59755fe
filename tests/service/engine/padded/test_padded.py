"""The padded engine on ordinary models: the tokens of the paged one, whatever joins, leaves, fails or is drawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from patches import parse, patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.engine import Engine
from service.engine.failures import EngineFailed
from service.engine.limits import EngineLimits
from service.engine.padded.caches import joined, row_of, sizes
from service.engine.padded.sequence import Sequence, batches
from service.engine.request import EngineRequest, SamplingParams
from service.engine.thread.out_of_memory import OutOfMemory
from service.engine.verification import BEHIND, LONGEST, NEW, _check, checked_length, verify
from tests.methods import rows
from tests.models import VOCAB_SIZE, tiny_model
from tests.service.engine.generating import DEFAULT, GREEDY, finished

TOGETHER, ALONE = EngineChoice("padded"), EngineChoice("padded", together=False)
LIMITS = EngineLimits(cache_tokens=8192, score_tokens=64, max_batch_tokens=64, max_queue=64)


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@asynccontextmanager
async def running(
    choice: EngineChoice, family: str = "llama", limits: EngineLimits = LIMITS, ends: tuple[int, ...] = ()
) -> AsyncIterator[Engine]:
    with patched(tiny_model(family)[1]) as patch:
        engine = Engine(patch, limits, ends, choice=choice)
        try:
            yield engine
        finally:
            engine.thread.stop(grace_s=1.0)


async def until_idle(engine: Engine) -> None:
    """The engine's thread sees a cancellation between two steps.

    Raises:
        TimeoutError: when a request still runs after 15 seconds.
    """
    async with asyncio.timeout(15):
        while engine.load()["running"]:
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_every_method_gives_the_tokens_of_the_paged_engine() -> None:
    methods = [parse(fields) for row in rows(8) for fields in row.requests]
    found = []
    for choice in (PAGED, TOGETHER, ALONE):
        async with running(choice) as engine:
            work = [finished(engine, prompt(20 + n, n), 5, method) for n, method in enumerate(methods)]
            found.append([generation.token_ids for generation in await asyncio.gather(*work)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("choice", [TOGETHER, ALONE], ids=str)
@pytest.mark.parametrize("family", ["gemma3", "llama4", "gpt2", "bloom", "deepseek_v3", "mistral"])
def test_every_kind_of_attention_is_carried(family: str, choice: EngineChoice) -> None:
    with patched(tiny_model(family)[1]) as patch:
        _check(patch, choice, prompt(20))


@pytest.mark.parametrize("window", [4, 128, LONGEST - BEHIND])
def test_the_check_joins_rows_at_any_length_of_its_prompt(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[tuple[int, int]] = []
    model = tiny_model("mistral", sliding_window=window, max_position_embeddings=512)[1]
    with patched(model) as patch:
        monkeypatch.setattr("service.engine.verification.choices", lambda *_: (TOGETHER,))
        model.register_forward_pre_hook(
            lambda _, args, kwargs: forwards.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        assert verify(patch) == TOGETHER
        length = checked_length(patch) - NEW
    assert max(rows for rows, _ in forwards) >= 3, "rows decode together"
    assert any(1 < tokens < length - 2 for _, tokens in forwards), "prompts are read in chunks"


SAMPLINGS = [
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, seed=4, top_k=20, top_p=0.9, logprobs=2),
    SamplingParams(min_tokens=6, logprobs=0),
    SamplingParams(ignore_eos=True, repetition_penalty=1.4),
    SamplingParams(temperature=0.8, seed=5, min_p=0.02, frequency_penalty=0.5, stop_token_ids=(9, 17, 33)),
]


async def test_requests_are_drawn_as_in_the_paged_engine() -> None:
    found = []
    for choice in (PAGED, TOGETHER):
        async with running(choice, ends=tuple(range(0, VOCAB_SIZE, 8))) as engine:
            work = [finished(engine, prompt(9 + 5 * n, n), 16, sampling=each) for n, each in enumerate(SAMPLINGS)]
            found.append(await asyncio.gather(*work))
    for paged, padded in zip(*found, strict=True):
        assert (paged.token_ids, paged.finish_reason) == (padded.token_ids, padded.finish_reason)
        assert [entry.logprob for entry in paged.logprobs] == pytest.approx(
            [e.logprob for e in padded.logprobs], abs=1e-4
        )
    assert len(found[0][3].token_ids) == 16
    assert {generation.finish_reason for generation in found[0]} == {"stop", "length"}


async def test_long_prompts_are_read_in_chunks_with_progress() -> None:
    async with running(TOGETHER) as engine:
        progress: list[int] = []
        resolved = engine.patch.resolve(DEFAULT, 204)
        steps = engine.generate(prompt(200), resolved, GREEDY, 4, pe_method="default", on_prefill=progress.append)
        last = [list(generation.token_ids) async for generation in steps]
    assert progress == [64, 128, 192]
    assert [len(ids) for ids in last] == [1, 2, 3, 4]


async def test_a_model_that_drops_its_state_reads_prompts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(TOGETHER) as engine:
        expected = await finished(engine, prompt(200), 16)
    async with running(TOGETHER) as engine:
        monkeypatch.setitem(vars(engine.patch), "continues", False)
        lengths: list[int] = []
        engine.patch.model.register_forward_pre_hook(
            lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        found = await finished(engine, prompt(200), 16)
        assert engine.max_cached_len(engine.patch.resolve("streaming:window=8,sink_tokens=2", 300), 300) == 300
    assert lengths == [200] + [1] * 15
    assert found.token_ids == expected.token_ids


async def test_encodings_that_forget_give_their_memory_back() -> None:
    streaming = parse({"method": "streaming", "sink_tokens": 2, "window": 8})
    async with running(TOGETHER) as engine:
        resolved = engine.patch.resolve(streaming, 4000)
        assert engine.max_cached_len(resolved, 4000) < 200
        steps = engine.generate(prompt(150), resolved, GREEDY, 30, pe_method="streaming")
        used = [engine.thread.manager.tokens_in_cache()[0] async for _ in steps]
    assert max(used) <= 10


async def test_a_cancelled_request_leaves_the_others_exact() -> None:
    async with running(TOGETHER) as engine:
        expected = [(await finished(engine, prompt(20 + n, n), 40)).token_ids for n in range(4)]
        kept = [asyncio.create_task(finished(engine, prompt(20 + n, n), 40)) for n in range(4)]
        gone = [asyncio.create_task(finished(engine, prompt(30 + n, 9 + n), 2000)) for n in range(2)]
        while engine.load()["running"] < 6:
            await asyncio.sleep(0.005)
        for task in gone:
            task.cancel()
        assert [(await task).token_ids for task in kept] == expected
        await until_idle(engine)
        assert engine.load()["cache_tokens_used"] == engine.generations.reserved == engine.patch.slots.in_use() == 0


def run_out_of_memory_once(monkeypatch: pytest.MonkeyPatch, model: Any, rows: int) -> None:
    """The first forward of so many ``rows`` fails when it has computed everything."""
    forward, failed = model.forward, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if len(kwargs["input_ids"]) == rows and not failed:
            failed.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    monkeypatch.setattr(model, "forward", failing)


async def test_out_of_memory_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(TOGETHER) as engine:
        sampling = SamplingParams(temperature=1.0, seed=1, logprobs=1)
        short = [(prompt(10 + n, n), 30, DEFAULT, sampling) for n in range(3)]
        expected = [await finished(engine, *each) for each in short]
        run_out_of_memory_once(monkeypatch, engine.patch.model, rows=4)
        rest = [asyncio.create_task(finished(engine, *each)) for each in short]
        with pytest.raises(OutOfMemory, match="decoding") as raised:
            await finished(engine, prompt(18), 60)
        found = [await task for task in rest]
        assert engine.thread.restarts == 0
    assert not raised.value.alone
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [len(each.logprobs) for each in found] == [30] * 3


async def test_scoring_runs_between_steps() -> None:
    def work() -> Generator[int, None, str]:
        yield from range(50)
        return "done"

    async with running(TOGETHER) as engine:
        seen: list[int] = []
        scored, generation = await asyncio.gather(
            engine.score(work(), 10, seen.append, scored={}), finished(engine, prompt(10), 20)
        )
    assert (scored, seen) == ("done", list(range(50)))
    assert len(generation.token_ids) == 20


async def test_a_dead_thread_fails_what_ran_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(TOGETHER) as engine:
        before = await finished(engine, prompt(5), 6)
        with monkeypatch.context() as fault:
            fault.setattr(engine.patch.model, "forward", lambda **_: 1 / 0)
            with pytest.raises(EngineFailed, match="division by zero"):
                await finished(engine, prompt(5), 6)
        while engine.thread.is_alive and not engine.thread.restarts:  # a check that was under way may replace it first
            await asyncio.sleep(0.01)
        assert (await finished(engine, prompt(5), 6)).token_ids == before.token_ids
        assert engine.thread.restarts == 1
        engine.thread.stop(0.0)
        with pytest.raises(EngineFailed, match="shutting down"):
            await finished(engine, [2], 1)


async def test_stopping_lets_requests_finish() -> None:
    async with running(TOGETHER) as engine:
        task = asyncio.create_task(finished(engine, prompt(5), 50))
        while not engine.load()["running"]:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(engine.thread.stop, 10.0)
        assert len((await task).token_ids) == 50


def sequence(length: int, sink_window: tuple[int, int] | None = None) -> Sequence:
    request = EngineRequest([1] * (length + 1), 0, None, 1, GREEDY, sink_window=sink_window)
    return Sequence(request, num_computed=length)


def test_padding_is_at_most_half_of_a_batch() -> None:
    waiting = [sequence(length) for length in (100, 5, 90, 3, 60, 4)] + [sequence(80, (2, 8))]
    found = [[row.num_computed for row in group] for group in batches(waiting, together=True)]
    assert found == [[80], [100, 90, 60, 5, 4], [3]]
    assert all(len(group) * max(group) <= 2 * sum(group) for group in found)
    assert max(map(len, batches(waiting, together=False))) == 1


def test_joined_caches_come_apart_again() -> None:
    config = tiny_model("gemma3")[0]
    caches = []
    for length in (40, 7, 30):
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16), layer)
        caches.append(cache)
    whole = joined(caches)
    assert whole.get_seq_length() == 40
    assert sizes(whole)[1] == 0
    for row, (cache, length) in enumerate(zip(caches, (40, 7, 30), strict=True)):
        apart = row_of(whole, row, length)
        for layer, other in zip(apart.layers, cache.layers, strict=True):
            assert layer.get_seq_length() == length
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
