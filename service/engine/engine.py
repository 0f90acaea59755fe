"""One model's engine: asyncio on one side, the generation thread on the other.

A generation reserves all that it will ever hold, takes a slot, and streams tokens; leaving the stream early
cancels it. Long work (scoring) runs on the same thread in short steps. A thread that dies or stalls fails
what was running and is replaced, with a clean cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from patches import Method, Patched, ResolvedRecipe
from service import context
from service.engine.adapter import EncodingManager
from service.engine.encodings import EncodingsInUse
from service.engine.interleave import Work
from service.engine.request import EngineRequest, SamplingParams, TokenLogprobs
from service.metrics import EngineMetrics, Metrics
from service.sharing.admission import Admission, Ticket

log = structlog.get_logger()

WATCH_S = 0.5
"""How often somebody looks whether the generation thread is still there."""

STOP_S = 5.0
"""How long the generation thread may take to leave its step when it is told to stop at once."""


class EngineFailed(RuntimeError):
    """The generation thread died or stalled under this request; it is being replaced."""


class EngineStopping(EngineFailed):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine, in tokens unless the name says otherwise."""

    cache_tokens: int
    score_tokens: int
    page_size: int = 32
    max_batch_tokens: int = 1024
    max_requests_per_batch: int = 128
    max_queue: int = 256
    max_queue_tokens: int | None = None
    stall_timeout_s: float = 120.0
    prefix_sharing: bool = True
    shared: bool = False
    """Whether several tenants use the engine, so that none may hold all of it."""


@dataclass
class Generation:
    """A running generation: what it resolved to, and its tokens as they come. ``first_token_s`` is counted
    from admission."""

    resolved: ResolvedRecipe
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None
    cached_tokens: int = 0


class Engine:
    """Serves one patched model. Create, use and stop it from one event loop."""

    def __init__(
        self,
        patch: Patched,
        limits: EngineLimits,
        eos_token_ids: tuple[int, ...],
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.patch, self.limits, self.eos_token_ids = patch, limits, eos_token_ids
        self.metrics = metrics or EngineMetrics(Metrics(), "")
        waiting, waiting_tokens, shared = limits.max_queue, limits.max_queue_tokens, limits.shared
        self.generations = Admission(limits.cache_tokens, waiting, limits.page_size, waiting_tokens, shared=shared)
        self.scores = Admission(limits.score_tokens, waiting, 1, waiting_tokens, shared=shared)
        self.encodings = EncodingsInUse(patch.slots, shared=shared)
        self.restarts = 0
        self._manager = self._started()
        self._stopping = False
        self._listening: dict[asyncio.Queue[Any], EncodingManager] = {}
        self._jobs = 0
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
        """Whether the generation thread runs and moves; work submitted now would be served."""
        return self._ailment() is None and not self._stopping

    def _ailment(self) -> str | None:
        """What is wrong with the generation thread."""
        if not self._manager.is_running():
            return f"the generation thread has stopped: {self._manager.fatal_error()}"
        silent = time.monotonic() - self._manager.heartbeat
        if silent > self.limits.stall_timeout_s:
            return f"the generation thread has been in one step for {silent:.1f} seconds"
        return None

    @property
    def is_generating(self) -> bool:
        """Whether somebody waits for tokens."""
        return bool(self._listening)

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

    async def generate(  # noqa: PLR0913 - what a generation needs, and three options
        self,
        prompt_ids: list[int],
        method: Method,
        sampling: SamplingParams,
        max_new_tokens: int,
        *,
        ticket: Ticket | None = None,
        cache_salt: Hashable = None,
        on_prefill: Callable[[int], object] | None = None,
    ) -> AsyncGenerator[Generation]:
        """Stream of the same ``Generation``, once per step, until ``finish_reason`` is set.

        ``ticket`` is the place taken at the door; without one the request enters the queue here. Prefixes are
        shared within the current tenant, the encoding and ``cache_salt``. ``on_prefill`` is called on the event
        loop with the prompt tokens done, between the chunks of a long prompt.

        Raises:
            ValueError: when the method does not fit the model; TooLarge when the request never fits.
            QueueFull: when there is no room now.
            OutOfMemory: when a step of this request needs more memory than there is.
            EngineFailed: when the generation thread dies or stalls.
        """
        length = len(prompt_ids) + max_new_tokens
        created = time.perf_counter()
        resolved = self.patch.resolve(method, length)
        generation = Generation(resolved, [], [])
        reason = "error"
        try:
            async with self._admitted(resolved, length, ticket) as (slot, manager):
                request = EngineRequest(
                    prompt_ids,
                    slot,
                    (context.current().tenant, cache_salt, resolved),
                    max_new_tokens,
                    sampling,
                    eos_token_ids=self.eos_token_ids,
                    on_prefill=None if on_prefill is None else _threadsafe(on_prefill),
                    tenant=context.current().tenant,
                    sink_window=self.patch.sink_window(resolved),
                )
                async with aclosing(self._outputs(manager, request)) as outputs:
                    async for output in outputs:
                        self._update(generation, request, output, created, method.method)
                        yield generation
            reason = generation.finish_reason or "error"
        except (GeneratorExit, asyncio.CancelledError):
            reason = generation.finish_reason or "abort"  # the caller may have found a stop string
            raise
        finally:
            self.metrics.finished(method.method, generation, reason, time.perf_counter() - created)

    def max_cached_len(self, resolved: ResolvedRecipe, length: int) -> int:
        """The most tokens of cache that a generation of ``length`` tokens ever holds."""
        return self._manager.max_cached_len(self.patch.sink_window(resolved), length)

    @asynccontextmanager
    async def _admitted(
        self, resolved: ResolvedRecipe, length: int, ticket: Ticket | None
    ) -> AsyncIterator[tuple[int, EncodingManager]]:
        tokens = self.max_cached_len(resolved, length)
        if ticket is None:
            self.generations.check(tokens)
            (ticket,) = self.generations.enter([tokens])
        with ticket:
            ticket.resize(tokens)
            await ticket.granted.wait()
            async with self.encodings.slot(resolved) as slot:
                yield slot, self._alive_manager()

    async def _outputs(self, manager: EncodingManager, request: EngineRequest) -> AsyncGenerator[Any]:
        """The manager's outputs for one request; whatever ends the iteration, nothing stays behind."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        manager.requests[request.request_id] = request
        manager.register_result_handler(request.request_id, outputs.put_nowait)
        self._listening[outputs] = manager
        self._watch()
        finished = False
        try:
            manager.submit(request)
            while not finished:
                output = await outputs.get()
                if output is None:
                    raise self._failure("the generation thread has stopped or stalls") from manager.fatal_error()
                finished = output.is_finished()
                if output.error is not None:
                    raise request.failure or self._failure(output.error)
                yield output
        finally:
            self._listening.pop(outputs, None)
            if not finished:
                manager.cancel_request(request.request_id)
            manager.discard_handler(request.request_id)

    def _failure(self, why: str) -> EngineFailed:
        return EngineStopping() if self._stopping else EngineFailed(why)

    def _watch(self) -> None:
        """Look after the generation thread while anybody waits for it."""

        async def watch() -> None:
            while self._listening or self._jobs:
                await asyncio.sleep(min(WATCH_S, self.limits.stall_timeout_s / 4))
                self.revive()

        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(watch())

    def _update(self, generation: Generation, request: EngineRequest, output: Any, created: float, method: str) -> None:
        now = time.perf_counter() - created
        before = generation.queue_s + generation.prefill_s + generation.decode_s
        if generation.first_token_s is None:
            generation.queue_s = output.lifespan[0] - created
            generation.prefill_s = now - generation.queue_s
            generation.cached_tokens = request.cached_tokens
        generation.decode_s = now - generation.queue_s - generation.prefill_s
        new_tokens = len(output.generated_tokens) - len(generation.token_ids)
        self.metrics.step(method, generation, len(request.prompt_ids), now - before, new_tokens)
        if generation.first_token_s is None:
            generation.first_token_s = now
        generation.token_ids = output.generated_tokens
        generation.logprobs = request.logprobs[: len(output.generated_tokens)]
        if output.is_finished():
            ended = bool(generation.token_ids) and generation.token_ids[-1] in request.ends_at
            generation.finish_reason = "stop" if ended else "length"

    async def run(
        self, work: Work, tokens: int, on_progress: Callable[[Any], None], *, ticket: Ticket | None = None
    ) -> Any:
        """Run ``work`` between generation steps and return its value. Cancelling the caller ends it.

        ``tokens`` is the most it holds in a cache of its own; ``on_progress`` is called on the event loop.

        Raises:
            TooLarge, QueueFull: from admission; OutOfMemory when a step needs more memory than there is.
            EngineFailed: when the generation thread dies or stalls.
        """
        if ticket is None:
            self.scores.check(tokens)
            (ticket,) = self.scores.enter([tokens])
        with ticket:
            ticket.resize(tokens)
            await ticket.granted.wait()
            async with self.encodings.one():
                return await self._interleaved(work, on_progress)

    async def _interleaved(self, work: Work, on_progress: Callable[[Any], None]) -> Any:
        manager = self._alive_manager()
        self._jobs += 1
        self._watch()
        try:
            future = manager.interleaved.submit(work, _threadsafe(on_progress), context.current().tenant)
            manager.wake()
            return await asyncio.wrap_future(future)
        finally:
            self._jobs -= 1

    def revive(self) -> None:
        """Replace a generation thread that is dead or stalls, and fail what waits for it."""
        ailment = self._ailment()
        if ailment is None or self._stopping:
            return
        self.restarts += 1
        self.metrics.restarted()
        log.error("engine_restart", error=ailment, restarts=self.restarts)
        lost = self._manager
        lost.abandon(EngineFailed(ailment))
        self._manager = self._started()
        self._dismiss(lost)

    def _dismiss(self, manager: EncodingManager) -> None:
        """Tell whoever listens to ``manager`` that nothing more will come, by a None in their queue."""
        for listener, its_manager in self._listening.items():
            if its_manager is manager:
                listener.put_nowait(None)

    def _alive_manager(self) -> EncodingManager:
        """The manager, replaced if its thread is dead or stalls.

        Raises:
            EngineStopping: while the engine is stopping.
        """
        if self._stopping:
            raise EngineStopping
        self.revive()
        return self._manager

    def stop(self, grace_s: float) -> None:
        """Let running requests finish for ``grace_s`` seconds, then end the thread. Blocks; safe to repeat."""
        self._stopping = True
        self._manager.interleaved.close(EngineStopping())
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=grace_s)
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=STOP_S, hard_stop=True)
        if self._manager.is_running():
            log.error("engine_stuck", error="the generation thread does not end: it is left behind")
            self._manager.abandon(EngineStopping())


def _threadsafe(callback: Callable[[Any], object]) -> Callable[[Any], None]:
    """``callback`` on this event loop, to be called on another thread."""
    loop = asyncio.get_running_loop()

    def call(value: Any) -> None:
        loop.call_soon_threadsafe(callback, value)

    return call
