"""Layers that attend to a window or a chunk keep its pages only: the same tokens in less memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from patches import PagedBatch, parse, patched
from patches.attention.paged import batch as paged_batch
from service.engine.adapter import EncodingManager
from service.engine.adapter.configuration import sectors_of
from service.engine.adapter.pages.adoption import sized_by_us
from service.engine.choice import EngineChoice
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.request import SamplingParams
from service.engine.window import LocalWindow
from service.models.checkpoint.loading import ModelLoadError
from service.models.memory.cache_size import cache_bytes_per_token
from service.models.registry import ModelRegistry
from service.settings import Settings
from service.sharing.admission import TooLarge
from tests.models import WINDOW, by_tier, tiny_model
from tests.service.conftest import tiny_tokenizer
from tests.service.engine.adapter.test_architectures import one_pass
from tests.service.engine.adapter.test_paged_attention import (
    EAGER,
    LIMITS,
    NEW,
    SEGMENTS,
    WINDOWED,
    every_encoding,
    generated,
    prompts_for,
)
from tests.service.engine.adapter.test_paged_eviction import prompt_of
from tests.service.engine.generating import finished

FAMILIES = ("gemma3", "starcoder2", "llama4", "gpt_oss", "cohere2", "gemma2")
"""Windows in most layers, and in all; chunks; sinks; layers without rotation; windows in half of the layers."""

PAGE, STEP = 4, 16


# Tokens


@pytest.mark.parametrize("family", by_tier(FAMILIES))
def test_tokens_behind_pages_that_went_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of three windows, in chunks beside decoding: encodings of every kind have the tokens of whole caches."""
    gaps: list[tuple[int, ...]] = []
    made, windows = paged_batch.paged_batch, list[LocalWindow]()

    def noted(groups: Any, *args: Any) -> PagedBatch:
        local = groups[0]  # groups come in the order of layers, and the first one has a window
        assert all(s.evicted_pages == windows[0].evicted_pages(s.q_start) for s in local), "the position decides"
        gaps.append(tuple(max(sequence.evicted_pages for sequence in sequences) for sequences in groups))
        return made(groups, *args)

    monkeypatch.setattr("service.engine.adapter.inputs.paged_batch", noted)
    with patched(tiny_model(family)[1]) as patch:
        methods = [*every_encoding(patch)[::3], *map(parse, WINDOWED[:1])]
        prompts = prompts_for(methods, 3 * WINDOW)
        sectors = sectors_of(patch, LIMITS.page_size)
        assert sectors is not None
        windows.append(sectors.window)
        tokens, values, _ = generated(patch, EAGER, methods, prompts)
        expected, expected_values, _ = generated(patch, SEGMENTS, methods, prompts)
    assert tokens == expected
    assert torch.allclose(values, expected_values, atol=2e-4)
    assert max(max(each) for each in gaps) >= (2 * WINDOW - 8) // LIMITS.page_size
    assert {len(each) for each in gaps} == {1 if family == "starcoder2" else 2}


@asynccontextmanager
async def running(family: str, cache_tokens: int, **options: Any) -> AsyncIterator[Engine]:
    limits: dict[str, Any] = {"page_size": PAGE, "max_batch_tokens": STEP, **options}
    with patched(tiny_model(family)[1]) as patch:
        engine = Engine(patch, EngineLimits(cache_tokens, 64, **limits), (), choice=EngineChoice(attention="eager"))
        try:
            yield engine
        finally:
            engine.thread.stop(grace_s=1.0)


def reserved(engine: Engine, length: int) -> int:
    return engine.max_cached_len(engine.patch.resolve("default", length), length)


async def test_a_cache_serves_texts_that_are_longer_than_itself() -> None:
    """Three of four layers slide, so a text of 600 tokens takes as much memory as 240 in all layers."""
    async with running("cohere2", 240, prefix_sharing=False) as engine:
        assert reserved(engine, 600) <= 240 < reserved(engine, 1000)
        resolved = engine.patch.resolve("default", 600)
        steps = engine.generate(prompt_of(560), resolved, SamplingParams(), 40, pe_method="")
        held = [engine.load()["cache_tokens_used"] async for _ in steps]
        assert len(held) == 40
        assert 600 / 4 < max(held) <= reserved(engine, 600)
        with pytest.raises(TooLarge):
            await finished(engine, prompt_of(990), 10)


@pytest.mark.parametrize("asked", [None, 10_000])
def test_a_model_serves_texts_that_are_longer_than_its_cache(asked: int | None, tmp_path: Path) -> None:
    tiny_model("cohere2")[1].save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    settings = Settings(_env_file=None, model=str(tmp_path / "tiny"), attention="eager", cache_tokens=6400)
    registry = ModelRegistry(settings.model_copy(update={"max_length": asked}))
    try:
        served = registry.get("tiny")
        assert served.engine.longest > 3 * 6400
        assert served.bound == "ROPEWAY_MAX_LENGTH"
        assert served.max_length == (asked or 6400), "no further than 32 trained lengths, or than the cache"
        longest = served.engine.longest
        assert served.engine.reserved(longest) <= 6400 < served.engine.reserved(longest + 32)
    finally:
        registry.close()


def test_a_cache_without_room_for_a_token_is_refused(tmp_path: Path) -> None:
    tiny_model("cohere2")[1].save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")

    def refusal(cache_tokens: int, **others: Any) -> str:
        settings = Settings(
            _env_file=None, model=str(tmp_path / "tiny"), attention="eager", cache_tokens=cache_tokens, **others
        )
        with pytest.raises(ModelLoadError) as refused:
            ModelRegistry(settings)
        return str(refused.value)

    assert "a cache of 64 fits no request of tiny: one token takes 128" in refusal(64, page_size=64)
    assert "200 tokens of tiny do not fit into ROPEWAY_CACHE_TOKENS (96): 96 is the most" in refusal(96, max_length=200)


@pytest.mark.parametrize("family", ["gemma3", "starcoder2"])
async def test_prefixes_are_shared_also_behind_the_window(family: str) -> None:
    async with running(family, 800) as engine:
        text = prompt_of(150)
        first = await finished(engine, text, 20)
        again = await finished(engine, text, 20)
        assert again.cached_tokens == 148
        assert again.token_ids == first.token_ids
        shorter = await finished(engine, [*text[:90], 7], 20)
        assert shorter.cached_tokens == 88
    async with running(family, 800, prefix_sharing=False) as alone:
        assert shorter.token_ids == (await finished(alone, [*text[:90], 7], 20)).token_ids


async def test_all_memory_comes_back() -> None:
    async with running("gemma3", 2000) as engine:
        texts = [prompt_of(length, length % 3) for length in (5, 40, 41, 90, 130, 200)]
        await asyncio.gather(*(finished(engine, text, 9) for text in texts))
        cancelled = asyncio.create_task(finished(engine, prompt_of(300), 600))
        while not engine.load()["cache_tokens_used"]:
            await asyncio.sleep(0.001)
        cancelled.cancel()
        while engine.load()["running"] or engine.load()["cache_tokens_used"]:
            await asyncio.sleep(0.01)
        cache: Any = engine.thread.manager.batch_processor.cache  # type: ignore[union-attr]
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert len(cache.pool.free_sectors) == cache.num_sectors > 0
        for allocator in cache.cache_allocators.values():
            assert (allocator.block_table, allocator.left, allocator.evicted_pages) == ({}, {}, {})
        assert (cache.tables, cache.cache_allocators["sliding_attention"].chains) == ({}, {})


# Layers that share keys


@pytest.mark.parametrize("choice", [EAGER, SEGMENTS], ids=str)
def test_layers_that_share_keys_share_their_pages(choice: EngineChoice) -> None:
    """The last two of four layers attend to the keys of the first two, which slide and do not."""
    with patched(tiny_model("gemma3n")[1]) as patch:
        assert patch.shared == {2: 0, 3: 1}
        methods = [*every_encoding(patch)[::2], *map(parse, WINDOWED)]
        prompts = prompts_for(methods, 3 * WINDOW, seed=5)
        engine = choice.built(patch, LIMITS)
        assert isinstance(engine, EncodingManager)
        cache: Any = engine._create_batch_processor().cache
        layers = sum(len(each.layer_indices) for each in cache.cache_allocators.values())
        assert layers == 2
        per_token = cache_bytes_per_token(patch)
        assert sum(each.bytes_per_block for each in cache.cache_allocators.values()) == LIMITS.page_size * per_token
        tokens, values, _ = generated(patch, choice, methods, prompts)
        for method, prompt, found, logprobs in zip(methods, prompts, tokens, values, strict=True):
            logits = one_pass(patch, method, prompt + found[:-1], len(prompt) + NEW)[-NEW:].log_softmax(-1)
            assert logits.argmax(-1).tolist() == found
            assert torch.allclose(logits.amax(-1).float(), logprobs, atol=2e-4)


def test_a_model_waits_while_another_ones_cache_is_made() -> None:
    """Meanwhile, transformers' table of allocators has another entry."""
    built: list[EncodingManager] = []
    with patched(tiny_model("gemma3")[1]) as patch:
        thread = threading.Thread(target=lambda: built.append(EncodingManager(patch, LIMITS, "eager")))
        with sized_by_us():
            thread.start()
            thread.join(0.3)
            assert not built
        thread.join(10)
    assert len(built) == 1


def test_other_threads_see_the_model_as_it_is_while_its_cache_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager sees other layers and no mesh; an evaluation may plan its passes at the same time."""
    model, seen = tiny_model("gemma3")[1], list[Any]()
    config, mesh = model.config, object()
    make = PagedAttentionCache.__init__

    def making(cache: Any, **kwargs: Any) -> None:
        kinds = kwargs["config"].layer_types
        seen.append((dict(vars(config)), config.get_text_config(), model._device_mesh, kinds))
        make(cache, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "__init__", making)
    with patched(model) as patch:
        before = (dict(vars(config)), config.get_text_config())
        monkeypatch.setattr(model, "_device_mesh", mesh, raising=False)
        manager = EncodingManager(patch, LIMITS, "eager")
        manager._create_batch_processor()
        assert manager.model is model
    ((*found, with_mesh, kinds),) = seen
    assert tuple(found) == before
    assert with_mesh is mesh
    assert "sliding_attention" in kinds
