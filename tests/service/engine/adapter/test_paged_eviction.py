"""Pages that no later query reaches leave the paged cache: the same tokens in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch

from patches import Method, parse, patched
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from service.engine.sampling import sample
from service.engine.thread.out_of_memory import OutOfMemory
from service.engine.window import SinkWindow
from service.sharing.admission import TooLarge
from tests.methods import Fields
from tests.models import VOCAB_SIZE, WINDOW, tiny_model
from tests.service.engine.adapter.test_architectures import assert_greedy, one_pass

PAGE, STEP, NEW = 8, 16, 180
WINDOWED: dict[str, Fields] = {
    "positions by cache index": {"method": "streaming", "sink_tokens": 4, "window": 24},
    "positions in the text": {"method": "streaming", "sink_tokens": 4, "window": 24, "absolute_positions": True},
    "window alone": {"method": "streaming", "sink_tokens": 0, "window": 24},
    "window of one": {"method": "streaming", "sink_tokens": 9, "window": 1},
    "distance cap": {"method": "lm_infinite", "n_global": 5, "n_local": 24, "limit_distance": 30},
}
ORDINARY: list[Fields] = [{"method": "default"}, {"method": "yarn", "factor": 4}, {"method": "alibi"}]
STREAMING = parse(WINDOWED["positions by cache index"])
MOST = 7 * PAGE
"""Tokens that STREAMING ever holds: a page of sinks, and 23 + 16 more, in six pages where they begin worst."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


PROMPT = prompt_of(70)
RESERVED = len(PROMPT) + NEW
AT_ONCE = 72
"""Tokens of a step that reads the whole prompt."""


@asynccontextmanager
async def running(family: str = "llama", cache_tokens: int = 512, **options: Any) -> AsyncIterator[Engine]:
    limits: dict[str, Any] = {"page_size": PAGE, "max_batch_tokens": STEP, "prefix_sharing": False, **options}
    with patched(tiny_model(family)[1]) as patch:
        engine = Engine(patch, EngineLimits(cache_tokens, 64, **limits), eos_token_ids=())
        try:
            yield engine
        finally:
            engine.thread.stop(grace_s=1.0)


async def finish(
    engine: Engine, method: Method, prompt: list[int] = PROMPT, new: int = NEW, each: Callable[[], object] = int
) -> Generation:
    resolved = engine.patch.resolve(method, len(prompt) + new)
    steps = engine.generate(prompt, resolved, SamplingParams(), new, pe_method=method.method)
    async for generation in steps:
        each()
        last = generation
    return last


def in_use(engine: Engine) -> int:
    return engine.load()["cache_tokens_used"]


async def idle(engine: Engine) -> None:
    while engine.load()["running"] or engine.load()["waiting"] or in_use(engine):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("distance cap", STEP),
        ("distance cap", AT_ONCE),
        *(pytest.param(name, STEP, marks=pytest.mark.slow) for name in [*WINDOWED][:-1]),
        pytest.param("window of one", AT_ONCE, marks=pytest.mark.slow),
    ],
)
async def test_endless_generation_equals_the_masked_computation(name: str, step: int) -> None:
    method, held = parse(WINDOWED[name]), []
    async with running(max_batch_tokens=step) as engine:
        most = engine.max_cached_len(engine.patch.resolve(method, RESERVED), RESERVED)
        result = await finish(engine, method, each=lambda: held.append((in_use(engine), engine.generations.reserved)))
        await asyncio.wait_for(idle(engine), 10)
        assert len(result.token_ids) == NEW
        assert_greedy(engine.patch, method, PROMPT, result.token_ids)
        ordinary = one_pass(engine.patch, parse({"method": "default"}), PROMPT + result.token_ids[:-1], RESERVED)
        assert ordinary[69:].argmax(-1).tolist() != result.token_ids, "the window must matter"
    assert max(used for used, _ in held) <= most < RESERVED // 2
    assert {reserved for _, reserved in held} == {most}
    assert held[-1][0] <= 40 + 2 * PAGE, "while it decodes, the window and the first tokens are all that is held"


@pytest.mark.slow
async def test_a_generation_longer_than_the_cache() -> None:
    """A cache that holds the window twice serves two streams of more than three times its length."""
    async with running(cache_tokens=2 * MOST) as engine:
        prompts = [prompt_of(180, seed) for seed in range(3)]
        jobs = asyncio.gather(*(finish(engine, STREAMING, prompt) for prompt in prompts))
        results = await asyncio.wait_for(jobs, 120)  # what seems too long to read is never scheduled again
        for prompt, result in zip(prompts, results, strict=True):
            assert_greedy(engine.patch, STREAMING, prompt, result.token_ids)
        await asyncio.wait_for(idle(engine), 10)
        with pytest.raises(TooLarge):
            await finish(engine, parse({"method": "default"}))
        assert engine.generations.reserved == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sharing"), [("llama", False), ("llama", True), ("gemma2", False), ("gemma2", True), ("gpt_neox", True)]
)
async def test_windows_beside_ordinary_encodings(family: str, sharing: bool) -> None:
    """Gemma 2 has layers that slide by themselves. Shared prefixes are asked for twice."""
    methods = [parse(fields) for fields in [*WINDOWED.values(), *ORDINARY]]
    async with running(family, 4096, max_batch_tokens=64, prefix_sharing=sharing) as engine:
        for _ in range(1 + sharing):
            lengths = [75, 100, 33, 70, 90, 70, 50, 12]
            jobs = [finish(engine, *pair, 30) for pair in zip(methods, map(prompt_of, lengths), strict=True)]
            results = await asyncio.gather(*jobs)
            for method, length, result in zip(methods, lengths, results, strict=True):
                assert_greedy(engine.patch, method, prompt_of(length), result.token_ids)
        found = [result.cached_tokens for result in results]
        assert all(found) if sharing else not any(found)
        if not sharing:
            await asyncio.wait_for(idle(engine), 10)


async def test_a_model_whose_layers_differ_keeps_every_page() -> None:
    """One layer in four rotates nothing there; it attends to everything, and admission knows."""
    held: list[int] = []
    async with running("smollm3") as engine:
        result = await finish(engine, STREAMING, new=100, each=lambda: held.append(in_use(engine)))
        assert engine.max_cached_len(engine.patch.resolve(STREAMING, 170), 170) == 170
        assert_greedy(engine.patch, STREAMING, PROMPT, result.token_ids)
    assert max(held) >= 160


async def test_admission_counts_what_can_ever_be_held() -> None:
    async with running() as engine:
        resolved = engine.patch.resolve(STREAMING, 500)
        assert [engine.max_cached_len(resolved, length) for length in (30, 500, 100_000)] == [30, MOST, MOST]
        assert engine.max_cached_len(engine.patch.resolve(parse({"method": "default"}), 500), 500) == 500
    async with running("gemma2", max_batch_tokens=4) as engine:
        short = engine.patch.resolve(parse({"method": "streaming", "sink_tokens": 0, "window": 2}), 500)
        wide, narrow = 5 * PAGE, 2 * PAGE  # its sliding layers hold their own window, which is longer
        assert engine.max_cached_len(short, 500) == (wide + narrow) // 2
        assert wide > WINDOW


async def test_nothing_is_shared_behind_a_gap() -> None:
    """A hash covers a page and all pages before it. Behind the gap a table's rows no longer count pages. Hashed
    by row, page 4 would be found by the tokens of page 3."""
    async with running(prefix_sharing=True) as engine:
        ids = PROMPT[:10] + (await finish(engine, STREAMING, PROMPT[:10], 60)).token_ids
        prompt = [*ids[: 4 * PAGE], *ids[3 * PAGE : 4 * PAGE], 5]
        again = await finish(engine, STREAMING, prompt, 20)
        assert again.cached_tokens == 4 * PAGE
        assert_greedy(engine.patch, STREAMING, prompt, again.token_ids)


ENDLESS = 100_000
"""New tokens that take minutes: only a cancelled generation is over in seconds."""


async def test_cancelling_gives_everything_back() -> None:
    async with running() as engine:
        for stop_at in (0, 1, 100):
            resolved = engine.patch.resolve(STREAMING, len(PROMPT) + ENDLESS)
            steps = engine.generate(PROMPT, resolved, SamplingParams(), ENDLESS, pe_method=STREAMING.method)
            async with aclosing(steps) as generations:
                async for generation in generations:
                    if len(generation.token_ids) > stop_at:
                        break
            await asyncio.wait_for(idle(engine), 10)
            assert engine.generations.reserved == 0
            allocator: Any = engine.thread.manager.batch_processor.cache.cache_allocators["full_attention"]  # type: ignore[union-attr]
            assert (allocator.windows, allocator.evicted_pages, allocator.block_table) == ({}, {}, {})
        assert_greedy(engine.patch, STREAMING, PROMPT, (await finish(engine, STREAMING, new=100)).token_ids)


@pytest.mark.parametrize("failing_step", [3, 40])
async def test_a_step_that_runs_out_of_memory_is_repeated_exactly(
    monkeypatch: pytest.MonkeyPatch, failing_step: int
) -> None:
    """In the middle of the prompt and while decoding: the step is prepared again from pages that stayed."""
    async with running(max_batch_tokens=64) as engine:
        steps: list[int] = []

        def failing(*args: Any) -> torch.Tensor:
            tokens = sample(*args)
            if len(engine.thread.manager.requests) == 3:  # the longest may come some steps after the first
                steps.append(len(args[1]))
                if len(steps) == failing_step:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            return tokens

        monkeypatch.setattr("service.engine.adapter.runner.sample", failing)
        jobs = [finish(engine, STREAMING, prompt_of(length), 80) for length in (20, 31, 300)]
        *results, blamed = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(blamed, OutOfMemory)
        for length, result in zip((20, 31), results, strict=True):
            assert isinstance(result, Generation)
            assert_greedy(engine.patch, STREAMING, prompt_of(length), result.token_ids)
        await asyncio.wait_for(idle(engine), 10)
        assert engine.thread.restarts == 0


@pytest.mark.parametrize("first", [0, 1, 8, 11])
@pytest.mark.parametrize("last", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("step", [1, 5, 16])
def test_what_is_reserved_is_never_exceeded_and_is_needed(first: int, last: int, step: int) -> None:
    window, most = SinkWindow(first, last, PAGE), 0
    for offset in range(PAGE):
        for position in range(offset, 200, step):
            dropped, pages = window.evicted_pages(position), -(-(position + step) // PAGE)
            most = max(most, (pages - dropped) * PAGE)
            gone = range(window.sink_pages * PAGE, (window.sink_pages + dropped) * PAGE)
            assert all(first <= j <= position - last for j in gone)
            stays = position - len(gone) - (window.sink_pages * PAGE - first if dropped else 0)
            assert window.tokens_read(position) == stays
    assert most == window.max_cached_len(10_000, step)
    assert window.max_cached_len(17, step) <= 17
