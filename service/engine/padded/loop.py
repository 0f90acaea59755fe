"""The generation thread of the padded engine: requests in, steps, tokens out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Requests

import structlog
import torch

from patches import Patched
from service.engine import THREAD_NAME
from service.engine.failures import EngineFailed
from service.engine.limits import EngineLimits
from service.engine.padded.caches import CannotJoin
from service.engine.padded.sequence import Output, Sequence
from service.engine.padded.steps import Steps
from service.engine.request import EngineRequest
from service.engine.thread.cpu import Wake, generation_thread
from service.engine.thread.fairness import interleave
from service.engine.thread.interleave import Interleaved
from service.engine.window import max_cached_len
from service.sharing.turns import Turns

log = structlog.get_logger()

OnApart = Callable[[Exception], object]
"""Gets the error by which rows did not join."""

IDLE_S = 0.1
"""Seconds that an idle thread sleeps at most."""


class PaddedLoop:
    """Generation from the model's own caches, with the interface of ``EncodingManager``.

    ``requests`` maps ids to requests of the event loop. ``together`` lets rows share a forward. In service, it ends
    with the first rows whose caches do not join, and ``on_apart`` gets the error.
    """

    def __init__(
        self, patch: Patched, limits: EngineLimits, *, together: bool, on_apart: OnApart = lambda error: None
    ) -> None:
        self.requests: dict[str, EngineRequest] = {}
        self.interleaved = Interleaved(others_hold_memory=lambda: self.load()[0] > 0)
        self._patch, self._limits, self._turns = patch, limits, Turns()
        self._steps = Steps(patch, limits, self._turns, self._deliver, together=together)
        self._on_apart = on_apart
        self._handlers: dict[str, tuple[Callable[[Output], object], asyncio.AbstractEventLoop]] = {}
        self._wake = Wake()
        self._draining = self._stopped = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    # On the event loop

    def start(self) -> None:
        """Start a daemon thread: one that stalls for good must not keep the process alive."""
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def heartbeat(self) -> float:
        """Time of the last sign of the thread, on the clock of ``time.monotonic``."""
        return self._steps.heartbeat

    def fatal_error(self) -> Exception | None:
        """The error that ended the generation thread, or None."""
        return self._error

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """End the thread when its requests are done, or with ``hard_stop`` after its step, and wait ``timeout`` s."""
        self._draining, self._stopped = True, self._stopped or hard_stop
        self.wake()
        if block and self._thread is not None:
            self._thread.join(timeout)

    def abandon(self, error: Exception) -> None:
        """Give up on a thread that is dead or stalls, and fail the interleaved work.

        If the thread ever continues, it ends without another step.
        """
        self._stopped = True
        self.interleaved.close(error)

    def wake(self) -> None:
        """Make an idle thread look for work now."""
        self._wake.set()

    def register_result_handler(self, request_id: str, callback: Callable[[Output], object]) -> None:
        """Call ``callback`` on this event loop with every output of a request."""
        self._handlers[request_id] = callback, asyncio.get_running_loop()

    def discard_handler(self, request_id: str) -> None:
        """Forget a request without further outputs."""
        self._handlers.pop(request_id, None)
        self.requests.pop(request_id, None)

    def submit(self, request: EngineRequest) -> None:
        """Hand one request to the thread; its outputs go to the registered handler."""
        self._steps.inbox.put(request)
        self.wake()

    def cancel_request(self, request_id: str) -> None:
        """End a request before its next forward."""
        self._steps.inbox.put(request_id)
        self.wake()

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        every = list(self._steps.sequences.values())
        running = sum(sequence.has_state for sequence in every)
        return running, len(every) - running + self._steps.inbox.qsize()

    def tokens_in_cache(self) -> tuple[int, int]:
        """(tokens in use, capacity of the cache in tokens)."""
        used = sum(sequence.num_cached for sequence in list(self._steps.sequences.values()))
        return used, self._limits.cache_tokens

    def max_cached_len(self, sink_window: tuple[int, int] | None, length: int) -> int:
        """Most tokens that the cache contains of a generation of ``length`` tokens.

        ``sink_window`` counts the first and the last keys that its queries reach, None for all.
        """
        if not self._patch.continues:
            return length
        sliding = getattr(self._patch.model.config.get_text_config(), "sliding_window", None)
        cached = max_cached_len(sink_window, length, 1, self._limits.max_batch_tokens)
        return cached if sink_window is None else max(cached, min(length, sliding or 0))

    # On the generation thread

    def run_to_end(self, requests: Requests[EngineRequest]) -> list[list[int]]:
        """Generated token ids of ``requests``, run on this thread. For a loop that was not started.

        Raises:
            RuntimeError: whatever a step raises.
        """
        sequences = [Sequence(request) for request in requests]
        self._steps.sequences.update((sequence.request.request_id, sequence) for sequence in sequences)
        with self._on_device():
            while self._steps.run(set()):
                pass
        for request in requests:
            if request.failure is not None:
                raise request.failure
        return [sequence.generated() for sequence in sequences]

    def _run(self) -> None:
        error: Exception = EngineFailed("the generation thread ended before this request")
        try:
            with generation_thread(self._wake), self._on_device():
                while self._advance():
                    pass
        except Exception as raised:
            log.exception("generation_failed", error=str(raised))
            self._error = error = raised
        self._steps.take()
        for sequence in self._steps.sequences.values():
            self._deliver(sequence, error)
        self._steps.sequences = {}

    def _on_device(self) -> torch.cuda.device_of:
        return torch.cuda.device_of(next(self._patch.model.parameters()))

    def _advance(self) -> bool:
        """Take new requests and run one step, or sleep without work; false to end."""
        self._steps.heartbeat = time.monotonic()
        self._steps.take()
        sequences = self._steps.sequences
        if sequences or len(self.interleaved):
            self._wake.works()
        others = interleave(
            self.interleaved, self._turns, lambda: {sequence.request.tenant for sequence in sequences.values()}
        )
        if self._stopped:
            return False
        self._steps.heartbeat = time.monotonic()
        if self._step(others) or others:
            return True
        if self._draining and not sequences:
            return False
        self._wake.wait(IDLE_S)
        self._wake.clear()
        return True

    def _step(self, others: set[str]) -> bool:
        """One step. Rows that do not join keep their own caches, for a forward each from the next step on."""
        try:
            return self._steps.run(others)
        except CannotJoin as error:
            log.warning("rows_run_apart", reason=str(error))
            self._steps.together = False
            self._on_apart(error)
            return True

    def _deliver(self, sequence: Sequence, error: Exception | None) -> None:
        handler = self._handlers.get(sequence.request.request_id)
        if handler is not None:
            callback, loop = handler
            loop.call_soon_threadsafe(callback, sequence.output(error))
