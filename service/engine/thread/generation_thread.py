"""The generation thread, seen from the event loop: watched while work waits for it, replaced when it dies or stalls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import structlog
import torch

from patches import Patched
from service import context
from service.engine.adapter import EncodingManager
from service.engine.adapter.configuration import is_whole_on_cpu
from service.engine.choice import EngineChoice
from service.engine.failures import EngineFailed, EngineStopping
from service.engine.limits import EngineLimits
from service.engine.metrics import EngineMetrics
from service.engine.padded import PaddedLoop
from service.engine.request import EngineRequest
from service.engine.thread.interleave import Work
from service.machine.cpus import Neighbours

log = structlog.get_logger()

WATCH_S = 0.5
"""Seconds between two checks of the generation thread."""

STOP_S = 5.0
"""Seconds that the generation thread has to leave its step after a hard stop."""


class GenerationThread:
    """One model's generation thread. ``manager`` runs it and is replaced with it; ``restarts`` counts replacements.

    ``choice`` is the engine in use: without shared forwards once rows did not join.
    """

    def __init__(self, patch: Patched, limits: EngineLimits, metrics: EngineMetrics, choice: EngineChoice) -> None:
        self._patch, self._limits, self._metrics, self.choice = patch, limits, metrics, choice
        self.manager = self._started()
        self.restarts = 0
        self._stopping, self._ending = False, threading.Lock()
        self._listening: dict[asyncio.Queue[Any], EncodingManager | PaddedLoop] = {}
        self._interleaved = 0
        self._watching: asyncio.Task[None] | None = None
        self._neighbours = Neighbours(torch.get_num_threads() if is_whole_on_cpu(patch.model) else 1)

    def _started(self) -> EncodingManager | PaddedLoop:
        manager = self.choice.built(self._patch, self._limits, self._metrics.step, self._run_apart)
        manager.start()
        return manager

    def _run_apart(self, error: Exception) -> None:
        self.choice = self.choice.apart(error)

    @property
    def is_alive(self) -> bool:
        """True if the thread takes new work and moves."""
        return self._ailment() is None and not self._stopping

    @property
    def is_generating(self) -> bool:
        """True while any generation waits for tokens."""
        return bool(self._listening)

    def _ailment(self) -> str | None:
        """The reason to replace the thread, if any."""
        if not self.manager.is_running():
            return f"the generation thread has stopped: {self.manager.fatal_error()}"
        silent = time.monotonic() - self.manager.heartbeat
        if silent > self._limits.stall_timeout_s:
            return f"the generation thread has been in one step for {silent:.1f} seconds"
        return None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Any]:
        """The manager's outputs for ``request``. Leaving the iteration early cancels the request.

        Raises:
            EngineFailed: when the thread dies or stalls; OutOfMemory when a step of this request needs too much.
            GrammarFailed: when its answer cannot go on by its grammar.
        """
        manager = self._alive_manager()
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
                if output.error is not None or request.is_broken(output.generated_tokens):
                    raise request.failure or self._failure(output.error)
                yield output
        finally:
            self._listening.pop(outputs, None)
            if not finished:
                manager.cancel_request(request.request_id)
            manager.discard_handler(request.request_id)

    async def interleave(self, work: Work, on_progress: Callable[[Any], None]) -> Any:
        """Run ``work`` between generation steps; ``on_progress`` runs on the event loop.

        Raises:
            EngineFailed: when the thread dies or stalls; OutOfMemory when a step needs too much.
        """
        manager = self._alive_manager()
        self._interleaved += 1
        self._watch()
        try:
            future = manager.interleaved.submit(work, threadsafe(on_progress), context.current().tenant)
            manager.wake()
            return await asyncio.wrap_future(future)
        finally:
            self._interleaved -= 1

    def _failure(self, why: str) -> EngineFailed:
        return EngineStopping() if self._stopping else EngineFailed(why)

    def _watch(self) -> None:
        """Check the thread from time to time while any work waits for it."""

        async def watch() -> None:
            self._neighbours.begin()
            while self._listening or self._interleaved:
                await asyncio.sleep(min(WATCH_S, self._limits.stall_timeout_s / 4))
                self.revive()
                self._neighbours.look()

        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(watch())

    def _alive_manager(self) -> EncodingManager | PaddedLoop:
        """The manager, replaced if its thread is dead or stalls.

        Raises:
            EngineStopping: while the engine is stopping.
        """
        if self._stopping:
            raise EngineStopping
        self.revive()
        return self.manager

    def revive(self) -> None:
        """Replace a thread that is dead or stalls, and fail the work that waits for it."""
        ailment = self._ailment()
        if ailment is None or self._stopping:
            return
        self.restarts += 1
        self._metrics.restarted()
        log.error("engine_restart", error=ailment, restarts=self.restarts)
        lost = self.manager
        lost.abandon(EngineFailed(ailment))
        self.manager = self._started()
        self._tell(lost)

    def _tell(self, lost: EncodingManager | PaddedLoop) -> None:
        """End the generations that wait for this manager. On the event loop."""
        for outputs, manager in self._listening.items():
            if manager is lost:
                outputs.put_nowait(None)

    def stop(self, grace_s: float) -> None:
        """Let running requests finish for ``grace_s`` seconds, then end the thread. Blocks; safe to repeat.

        Calls take turns: the library forgets its thread in one while another looks at it.
        """
        self._stopping = True
        with self._ending:
            self._end(grace_s)

    def _end(self, grace_s: float) -> None:
        self.manager.interleaved.close(EngineStopping())
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=grace_s)
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=STOP_S, hard_stop=True)
        if self.manager.is_running():
            log.error("engine_stuck", error="the generation thread does not end: it is left behind")
            self.manager.abandon(EngineStopping())
            if self._watching is not None:
                with suppress(RuntimeError):  # the event loop has ended
                    self._watching.get_loop().call_soon_threadsafe(self._tell, self.manager)


def threadsafe(callback: Callable[[Any], object]) -> Callable[[Any], None]:
    """``callback`` on this event loop, for calls from another thread."""
    loop = asyncio.get_running_loop()

    def call(value: Any) -> None:
        loop.call_soon_threadsafe(callback, value)

    return call
