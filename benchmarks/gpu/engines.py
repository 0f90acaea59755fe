"""The engines that decode: ours, transformers' continuous batching and its ``generate``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from benchmarks.gpu.scale import Scale
from patches import Patched
from service.engine.choice import EngineChoice, choices
from service.engine.engine import Engine
from service.engine.limits import EngineLimits

BATCH_TOKENS = 4096
"""Most tokens of one forward, for every engine."""


@contextmanager
def engine_of(
    patch: Patched, scale: Scale, batch: int, choice: EngineChoice | None = None
) -> Iterator[tuple[asyncio.Runner, Engine]]:
    """Our engine, ``choice`` or with the kernel where there is one, and the event loop that it lives in.

    It has room for ``batch`` requests, and shares no prefixes.
    """
    limits = EngineLimits(
        cache_tokens=cache_room(scale, batch), score_tokens=1024, max_batch_tokens=BATCH_TOKENS, prefix_sharing=False
    )

    chosen = choice or choices("triton" if scale.device == "cuda" else "segments", torch.device(scale.device))[0]

    async def start() -> Engine:
        return Engine(patch, limits, (), choice=chosen)

    with asyncio.Runner() as loop:
        engine = loop.run(start())
        try:
            yield loop, engine
        finally:
            engine.thread.stop(1.0)


def cache_room(scale: Scale, batch: int) -> int:
    pages = -(-(scale.prompt + scale.steps + 64) // 32)
    return 32 * pages * batch


@contextmanager
def batching(model: PreTrainedModel, scale: Scale, batch: int) -> Iterator[Callable[[list[list[int]], int], None]]:
    """transformers' own continuous batching with its SDPA attention, at the same sizes."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=cache_room(scale, batch) // 32,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=128,
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    started: list[ContinuousBatchingManager] = []

    def run(prompts: list[list[int]], new_tokens: int) -> None:
        if not started:  # here and not above, so that a failure to start is this run's failure
            started.append(model.init_continuous_batching(greedy, config))
            started[0].start()
        answer(started[0], prompts, new_tokens)

    try:
        yield run
    finally:
        for manager in started:
            manager.stop(block=True, timeout=5)


def answer(manager: ContinuousBatchingManager, prompts: list[list[int]], new_tokens: int) -> None:
    """Hand all prompts over and wait for the last answer."""
    manager.add_requests(prompts, max_new_tokens=new_tokens)
    waiting, deadline = len(prompts), time.monotonic() + 60
    while waiting:
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        waiting -= result is not None and result.is_finished()
        if result is None and (not manager.is_running() or time.monotonic() > deadline):
            raise RuntimeError(f"no answer: {manager.background_thread_status.fatal_error}")


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> None:
    """One batch of equally long prompts through ``generate``."""
    ids = torch.tensor(prompts, device=model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
