"""One model's engine: asyncio on one side, the generation thread on the other.

A generation reserves its whole length, takes a slot, and streams tokens; leaving the stream early
cancels it. Long work (scoring) runs on the same thread in short steps. A dead thread fails what was
running and is started anew with a clean cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from patches import Method, Patched, ResolvedRecipe
from service.engine.adapter import EncodingManager
from service.engine.admission import Admission
from service.engine.interleave import Work
from service.engine.request import EngineRequest, SamplingParams, TokenLogprobs

log = structlog.get_logger()

WATCH_S = 0.5
"""How often somebody looks whether the generation thread is still there."""


class EngineFailed(RuntimeError):
    """The generation thread died under this request; it is being restarted."""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine, in tokens unless the name says otherwise."""

    cache_tokens: int
    score_tokens: int
    page_size: int = 32
    max_batch_tokens: int = 1024
    max_requests_per_batch: int = 128
    max_queue: int = 256
    prefix_sharing: bool = True


@dataclass
class Generation:
    """A running generation: what it resolved to, and its tokens as they come."""

    resolved: ResolvedRecipe
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Engine:
    """Serves one patched model. Create, use and stop it from one event loop."""

    def __init__(self, patch: Patched, limits: EngineLimits, eos_token_ids: tuple[int, ...]) -> None:
        self.patch, self.limits, self.eos_token_ids = patch, limits, eos_token_ids
        self.generations = Admission(limits.cache_tokens, limits.max_queue, limits.page_size)
        self.scores = Admission(limits.score_tokens, limits.max_queue)
        self.restarts = 0
        self._manager = self._started()
        self._stopping = False
        self._listening: dict[asyncio.Queue[Any], EncodingManager] = {}
        self._watching: asyncio.Task[None] | None = None

    def _started(self) -> EncodingManager:
        manager = EncodingManager(
            self.patch,
            cache_tokens=self.limits.cache_tokens,
            page_size=self.limits.page_size,
            max_batch_tokens=self.limits.max_batch_tokens,
            max_requests_per_batch=self.limits.max_requests_per_batch,
            prefix_sharing=self.limits.prefix_sharing,
        )
        manager.start()
        return manager

    @property
    def is_alive(self) -> bool:
        """Whether the generation thread runs; work submitted now would be served."""
        return self._manager.is_running() and not self._stopping

    def load(self) -> dict[str, int]:
        """Requests running and waiting, scoring jobs, tokens of cache in use and in total."""
        running, waiting = self._manager.load()
        used, total = self._manager.tokens_in_cache()
        return {
            "running": running,
            "waiting": waiting + self.generations.waiting,
            "scoring": len(self._manager.interleaved),
            "cache_tokens_used": used,
            "cache_tokens": total,
            "slots_in_use": self.patch.slots.in_use(),
        }

    async def generate(
        self, prompt_ids: list[int], method: Method, sampling: SamplingParams, max_new_tokens: int
    ) -> AsyncGenerator[Generation]:
        """Stream of the same ``Generation``, once per step, until ``finish_reason`` is set.

        Raises:
            ValueError: when the method does not fit the model; TooLarge when the request never fits.
            QueueFull, SlotsExhausted: when there is no room now.
            EngineFailed: when the generation thread dies.
        """
        length = len(prompt_ids) + max_new_tokens
        created = time.perf_counter()
        resolved = self.patch.resolve(method, length)
        async with self._admitted(resolved, length) as (slot, manager):
            request = EngineRequest(
                prompt_ids, slot, resolved, max_new_tokens, sampling, eos_token_ids=self.eos_token_ids
            )
            generation = Generation(resolved, [], [])
            async with aclosing(self._outputs(manager, request)) as outputs:
                async for output in outputs:
                    self._update(generation, request, output, created)
                    yield generation

    @asynccontextmanager
    async def _admitted(self, resolved: ResolvedRecipe, length: int) -> AsyncIterator[tuple[int, EncodingManager]]:
        reserved = await self.generations.acquire(length)
        try:
            manager = self._alive_manager()
            slot = self.patch.slots.acquire(resolved)
            try:
                yield slot, manager
            finally:
                self.patch.slots.release(slot)
        finally:
            self.generations.release(reserved)

    async def _outputs(self, manager: EncodingManager, request: EngineRequest) -> AsyncGenerator[Any]:
        """The manager's outputs for one request; whatever ends the iteration, nothing stays behind."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        manager.requests[request.request_id] = request
        manager.register_result_handler(request.request_id, outputs.put_nowait)
        self._watch(manager, outputs)
        finished = False
        try:
            manager.submit(request)
            while not finished:
                output = await outputs.get()
                if output is None:
                    raise EngineFailed("the generation thread has stopped") from manager.fatal_error()
                finished = output.is_finished()
                if output.error is not None:
                    raise EngineFailed(output.error)
                yield output
        finally:
            self._listening.pop(outputs, None)
            if not finished:
                manager.cancel_request(request.request_id)
            manager.discard_handler(request.request_id)

    def _watch(self, manager: EncodingManager, outputs: asyncio.Queue[Any]) -> None:
        """Wake whoever waits for a thread that died without a word, by a None in their queue."""

        async def watch() -> None:
            while self._listening:
                await asyncio.sleep(WATCH_S)
                for listener, its_manager in self._listening.items():
                    if not its_manager.is_running():
                        listener.put_nowait(None)

        self._listening[outputs] = manager
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(watch())

    def _update(self, generation: Generation, request: EngineRequest, output: Any, created: float) -> None:
        now = time.perf_counter()
        if not generation.token_ids:
            generation.queue_s = output.lifespan[0] - created
            generation.prefill_s = now - output.lifespan[0]
        generation.decode_s = now - created - generation.queue_s - generation.prefill_s
        generation.token_ids = output.generated_tokens
        generation.logprobs = request.logprobs[: len(output.generated_tokens)]
        if output.is_finished():
            ended = bool(generation.token_ids) and generation.token_ids[-1] in self.eos_token_ids
            generation.finish_reason = "stop" if ended else "length"

    async def run(self, work: Work, tokens: int, on_progress: Callable[[Any], None]) -> Any:
        """Run ``work`` between generation steps and return its value. Cancelling the caller ends it.

        ``tokens`` is the most it holds in a cache of its own; ``on_progress`` is called on the event loop.

        Raises:
            TooLarge, QueueFull: from admission; EngineFailed when the generation thread dies.
        """
        loop = asyncio.get_running_loop()
        reserved = await self.scores.acquire(tokens)
        try:
            manager = self._alive_manager()

            def report(progress: Any) -> None:
                loop.call_soon_threadsafe(on_progress, progress)

            future = manager.interleaved.submit(work, report)
            manager.wake()
            return await asyncio.wrap_future(future)
        finally:
            self.scores.release(reserved)

    def revive(self) -> None:
        """Start a dead generation thread anew without waiting for a request to need it."""
        if not self._stopping:
            self._alive_manager()

    def _alive_manager(self) -> EncodingManager:
        """The manager, started anew if its thread has died.

        Raises:
            EngineFailed: while the engine is stopping.
        """
        if self._stopping:
            raise EngineFailed("the server is shutting down")
        if not self._manager.is_running():
            self.restarts += 1
            log.error("engine_restart", error=str(self._manager.fatal_error()), restarts=self.restarts)
            self._manager.interleaved.close(EngineFailed("the generation thread has stopped"))
            self._manager = self._started()
        return self._manager

    def stop(self, grace_s: float) -> None:
        """Let running requests finish for ``grace_s`` seconds, then end the thread. Blocks; safe to repeat."""
        self._stopping = True
        self._manager.interleaved.close(EngineFailed("the server is shutting down"))
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=grace_s)
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=5.0, hard_stop=True)
