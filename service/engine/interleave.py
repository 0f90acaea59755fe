"""Long work in short steps: generators advanced by the generation thread between two of its steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

from service.engine.out_of_memory import OutOfMemory, give_back, is_out_of_memory

Work = Generator[Any, None, Any]


class _Job(NamedTuple):
    work: Work
    future: Future[Any]
    on_progress: Callable[[Any], object]
    tenant: str


class Interleaved:
    """Generators by tenant, round-robin within one. Each ``next`` must be short: it delays every running request.

    ``others_hold_memory`` tells whether anything beside this work does: who runs out of memory is told.
    """

    def __init__(self, others_hold_memory: Callable[[], bool] = lambda: False) -> None:
        self._others_hold_memory = others_hold_memory
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None
        self._closed: Exception | None = None

    def submit(self, work: Work, on_progress: Callable[[Any], object], tenant: str = "") -> Future[Any]:
        """Queue ``work`` of ``tenant``. What it yields goes to ``on_progress`` on the generation thread, what it
        returns into the future. Cancelling the future closes the generator before its next step."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
            else:
                self._queue.append(_Job(work, future, on_progress, tenant))
        return future

    def tenants(self) -> set[str]:
        """Those with work that is still wanted. Cancelled work is closed here and gives back what it holds."""
        with self._lock:
            cancelled = [job for job in self._queue if job.future.cancelled()]
            self._queue = deque(job for job in self._queue if job not in cancelled)
            found = {job.tenant for job in self._queue}
        for job in cancelled:
            job.work.close()
        return found

    def advance(self, tenant: str = "") -> bool:
        """Run one step of the tenant's work that has waited longest; false when it has none."""
        with self._lock:
            job = next((job for job in self._queue if job.tenant == tenant), None)
            if job is None:
                return False
            self._queue.remove(job)
            self._current = job
        work, future, on_progress, _ = job
        if future.cancelled():
            work.close()
            return True
        out_of_memory = False
        try:
            on_progress(next(work))
        except StopIteration as stop:
            self._settle(future, stop.value)
        except Exception as error:
            out_of_memory = is_out_of_memory(error)
            if not out_of_memory:
                self._settle(future, error=error)
        else:
            self._requeue(job)
        if out_of_memory:
            give_back()
            alone = not (self._queue or self._others_hold_memory())
            self._settle(future, error=OutOfMemory("scoring", alone=alone))
        return True

    def _requeue(self, job: _Job) -> None:
        with self._lock:
            self._current = None
            if self._closed is None:
                self._queue.append(job)
                return
        job.work.close()
        self._settle(job.future, error=self._closed)

    def close(self, error: Exception) -> None:
        """Fail everything queued, now and later: the thread that would run it is gone, or stalls inside a step."""
        with self._lock:
            self._closed = error
            queue, self._queue = self._queue, deque()
            current = self._current
        for job in queue:
            job.work.close()
            self._settle(job.future, error=error)
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
        return len(self._queue)
