"""Long work in short steps: generators advanced by the generation thread between two of its steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

from service.engine.thread.out_of_memory import OutOfMemory, give_back, is_out_of_memory

Work = Generator[Any, None, Any]


class _Entry(NamedTuple):
    work: Work
    future: Future[Any]
    on_progress: Callable[[Any], object]
    tenant: str


class Interleaved:
    """Generators by tenant, round-robin within one. Each ``next`` must be short: it delays every running request.

    ``others_hold_memory`` is true if anything else uses memory; an out-of-memory error reports it. ``before_step`` is
    called before each step of work.
    """

    def __init__(
        self,
        others_hold_memory: Callable[[], bool],
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._others_hold_memory, self._before_step = others_hold_memory, before_step
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._queue: deque[_Entry] = deque()
        self._current: _Entry | None = None
        self._closed: Exception | None = None

    def submit(self, work: Work, on_progress: Callable[[Any], object], tenant: str) -> Future[Any]:
        """Queue ``work`` of ``tenant``. Yielded values go to ``on_progress`` on the generation thread, the returned
        value into the future. Cancelling the future closes the generator before its next step."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
            else:
                self._queue.append(_Entry(work, future, on_progress, tenant))
        return future

    def tenants(self) -> set[str]:
        """Those with work that is still wanted. Cancelled work is closed here and gives back what it holds."""
        with self._lock:
            cancelled = [entry for entry in self._queue if entry.future.cancelled()]
            self._queue = deque(entry for entry in self._queue if entry not in cancelled)
            found = {entry.tenant for entry in self._queue}
        for entry in cancelled:
            entry.work.close()
        return found

    def advance(self, tenant: str) -> bool:
        """Run one step of the tenant's work that has waited longest; false when it has none."""
        with self._lock:
            entry = next((entry for entry in self._queue if entry.tenant == tenant), None)
            if entry is None:
                return False
            self._queue.remove(entry)
            self._current = entry
        try:
            self._step(entry)
        finally:
            self._current = None
        return True

    def _step(self, entry: _Entry) -> None:
        work, future, on_progress, _ = entry
        if future.cancelled():
            work.close()
            return
        out_of_memory = False
        try:
            self._before_step()
            on_progress(next(work))
        except StopIteration as stop:
            self._settle(future, stop.value)
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            if not out_of_memory:
                self._settle(future, error=error)
        else:
            self._requeue(entry)
        if out_of_memory:
            give_back()
            alone = not (self._queue or self._others_hold_memory())
            self._settle(future, error=OutOfMemory("scoring", alone=alone))

    def _requeue(self, entry: _Entry) -> None:
        with self._lock:
            if self._closed is None:
                self._queue.append(entry)
                return
        entry.work.close()
        self._settle(entry.future, error=self._closed)

    def close(self, error: Exception) -> None:
        """Fail everything queued, now and later: the thread that would run it is gone, or stalls inside a step."""
        with self._lock:
            self._closed = error
            queue, self._queue = self._queue, deque()
            current = self._current
        for entry in queue:
            entry.work.close()
            self._settle(entry.future, error=error)
        if current is not None:
            self._settle(current.future, error=error)  # its generator may be running: the thread that runs it closes it

    def _settle(self, future: Future[Any], value: Any = None, error: Exception | None = None) -> None:
        """Once: the event loop may fail what a stalled thread finishes after all."""
        with self._settling:
            if future.done() or not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def __len__(self) -> int:
        """Work that waits for its next step, or is in one."""
        with self._lock:
            current = self._current
            is_in_step = current is not None and not current.future.done() and current not in self._queue
            return len(self._queue) + is_in_step
