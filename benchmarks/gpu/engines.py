"""The engines that decode: ours, transformers' continuous batching and its ``generate``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.streamers import BaseStreamer

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.steps import Arrivals
from benchmarks.speed.generate_speed import concurrent, serving
from patches import Method, Patched
from service.engine.choice import EngineChoice, choices
from service.engine.engine import Engine
from service.engine.limits import EngineLimits

BATCH_TOKENS = 4096
"""Most tokens of one forward, for every engine."""

PATIENCE_S = 150
"""Seconds for the prompts and the answers of one run of transformers' continuous batching."""


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
    with serving(patch, limits, chosen) as running:
        yield running


def answers(
    loop: asyncio.Runner, engine: Engine, prompts: Sequence[list[int]], methods: Sequence[Method], new_tokens: int
) -> Arrivals:
    """Answer all ``prompts`` at once."""
    arrivals: Arrivals = [[] for _ in prompts]

    def arrived(request: int, tokens: int) -> None:
        times = arrivals[request]
        times.extend([time.perf_counter()] * (tokens - len(times)))

    loop.run(concurrent(engine, prompts, methods, new_tokens, arrived))
    return arrivals


def cache_room(scale: Scale, batch: int) -> int:
    pages = -(-(scale.prompt + scale.steps + 64) // 32)
    return 32 * pages * batch


@contextmanager
def batching(model: PreTrainedModel, scale: Scale, batch: int) -> Iterator[Callable[[list[list[int]], int], Arrivals]]:
    """transformers' own continuous batching with its SDPA attention, at the same sizes."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=cache_room(scale, batch) // 32,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=128,
        allow_block_sharing=False,
        safety_margin=0.0,  # else it keeps a part of the cache free, and some requests wait for others to end
        auto_switch_to_flash=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    started: list[ContinuousBatchingManager] = []

    def run(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        if not started:  # here and not above, so that a failure to start is this run's failure
            started.append(model.init_continuous_batching(greedy, config))
            started[0].start()
        return answer(started[0], prompts, new_tokens)

    try:
        yield run
    finally:
        for manager in started:
            manager.stop(block=True, timeout=5)


def answer(manager: ContinuousBatchingManager, prompts: list[list[int]], new_tokens: int) -> Arrivals:
    """Hand all prompts over and wait for the last answer."""
    manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
    arrivals: Arrivals = []
    deadline = time.monotonic() + PATIENCE_S
    while len(arrivals) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            arrivals.append(result.timestamps or [])
        if result is None and (not manager.is_running() or time.monotonic() > deadline):
            raise RuntimeError(f"no answer in {PATIENCE_S} s: {manager.background_thread_status.fatal_error}")
    return arrivals


class _Clock(BaseStreamer):
    """Notes when ``generate`` has tokens; the first it gets are the prompts."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def generate(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> Arrivals:
    """One batch of equally long prompts through ``generate``."""
    ids, clock = torch.tensor(prompts, device=model.device), _Clock()
    greedy = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **greedy)
    return [clock.times[1:]] * len(prompts)
