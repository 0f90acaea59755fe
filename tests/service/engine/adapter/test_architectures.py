"""The engine on every family: four encodings in one paged batch equal greedy decoding without a cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches import Method, Patched, encode, parse, patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.models.memory.cache_size import cache_bytes_per_token
from tests.models import OTHER_FAMILIES, VOCAB_SIZE, by_tier, every_family, tiny_model
from tests.patches.model.architectures.test_other_families import FAMILY, REQUESTS
from tests.service.engine.generating import finished

METHODS = [
    parse({"method": "default"}),
    parse({"method": "yarn", "factor": 4}),
    parse({"method": "alibi"}),
    parse({"method": "self_extend", "group_size": 4, "neighbor_window": 8}),
]
NEW = 10
LIMITS = EngineLimits(cache_tokens=1024, score_tokens=64, max_batch_tokens=32)


@every_family
async def test_mixed_encodings_in_a_paged_batch(family: str) -> None:
    sizes: dict[str, Any] = {"sliding_window": 16} if family == "mistral" else {}
    await check(tiny_model(family, **sizes)[1], METHODS)


@pytest.mark.parametrize(("size", "local"), [(40, 8), (12, 4)])
async def test_dual_chunk_attention_that_a_checkpoint_declares(size: int, local: int) -> None:
    """Its first chunk may be shorter than the text of the check at the start."""
    declared = {"chunk_size": size, "local_size": local, "original_max_position_embeddings": 48}
    await check(tiny_model("qwen2", dual_chunk_attention_config=declared)[1], METHODS)


@pytest.mark.parametrize("name", by_tier(OTHER_FAMILIES))
async def test_families_with_seams_of_their_own(name: str) -> None:
    """The first request extends what has an end; the second is the checkpoint's own."""
    methods = [parse(fields) for fields in REQUESTS[FAMILY[name]][:4]]
    methods[1] = parse({"method": "default"})
    await check(tiny_model(name)[1], methods)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("diffllama", {}),
        ("deepseek_v2", {}),
        ("deepseek_v2", {"v_head_dim": 24}),
        ("deepseek_v3", {"v_head_dim": 40}),
    ],
)
async def test_values_that_are_not_as_wide_as_keys(family: str, sizes: dict[str, Any]) -> None:
    model = tiny_model(family, attn_implementation="sdpa", **sizes)[1]
    await equals_own_generation(model)
    await check(model, METHODS)


@pytest.mark.parametrize("name", ["codegen", "gpt_neo"])
async def test_a_family_with_a_seam_of_its_own_generates_as_transformers_does(name: str) -> None:
    """Prompts exceed the window of GPT-Neo and the tokens of a step."""
    await equals_own_generation(tiny_model(name, max_position_embeddings=128)[1])


async def equals_own_generation(model: PreTrainedModel) -> None:
    """Alone, and then among others on the same prefixes, the engine's tokens are those of ``model.generate``."""
    prompts = random_prompts()
    expected = [own(model, prompt) for prompt in prompts]
    default = parse({"method": "default"})
    with patched(model) as patch:
        engine = Engine(patch, LIMITS, eos_token_ids=())
        try:
            alone = [await finished(engine, prompt, NEW, default) for prompt in prompts]
            together = await asyncio.gather(*[finished(engine, prompt, NEW, default) for prompt in prompts])
        finally:
            engine.thread.stop(grace_s=1.0)
    assert [generation.token_ids for generation in alone] == expected
    assert [generation.token_ids for generation in together] == expected


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (50, 13, 80, 41)]


def own(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Token ids of transformers' own greedy generation."""
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    output = model.generate(torch.tensor([prompt]), do_sample=False, **lengths)
    return [int(token) for token in output[0, len(prompt) :]]


async def check(model: PreTrainedModel, methods: list[Method], choice: EngineChoice = PAGED, **cached: Any) -> None:
    """``cached`` replaces measured parts of the cached states."""
    prompts = random_prompts()
    with patched(model) as patch:
        patch.cached = patch.cached._replace(**cached)
        engine = Engine(patch, LIMITS, (), choice=choice)
        try:
            jobs = [finished(engine, prompt, NEW, method) for prompt, method in zip(prompts, methods, strict=True)]
            generations = await asyncio.gather(*jobs)
            allocators = engine.thread.manager.batch_processor.cache.cache_allocators.values()
        finally:
            engine.thread.stop(grace_s=1.0)
        assert sum(a.bytes_per_block for a in allocators) == LIMITS.page_size * cache_bytes_per_token(patch)
        for prompt, method, generation in zip(prompts, methods, generations, strict=True):
            assert len(generation.token_ids) == NEW
            assert_greedy(patch, method, prompt, generation.token_ids)


@torch.no_grad()
def one_pass(patch: Patched, method: Method, ids: list[int], reserved: int) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one pass over everything, without a cache."""
    slot = patch.slots.acquire(patch.resolve(method, reserved))
    position_ids = encode(torch.arange(len(ids)), slot)[None]
    try:
        logits: torch.Tensor = patch.model(torch.tensor([ids]), position_ids=position_ids, use_cache=False).logits[0]
    finally:
        patch.slots.release(slot)
    return logits


def assert_greedy(patch: Patched, method: Method, prompt: list[int], generated: list[int]) -> None:
    """Every generated token is the most likely one after all tokens before it, in one pass. By induction the tokens
    are those of greedy decoding without a cache."""
    ids = prompt + generated
    logits = one_pass(patch, method, ids[:-1], len(ids))[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == generated
