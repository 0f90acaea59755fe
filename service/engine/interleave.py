"""Long work in short steps: generators advanced by the generation thread between two of its steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from service.engine.memory import OutOfMemory, give_back, is_out_of_memory

Work = Generator[Any, None, Any]
_Job = tuple[Work, "Future[Any]", Callable[[Any], object]]


class Interleaved:
    """Round-robin over generators. Each ``next`` must be short: it delays every running request.

    ``others_hold_memory`` tells whether anything beside this work does: who runs out of memory is told.
    """

    def __init__(self, others_hold_memory: Callable[[], bool] = lambda: False) -> None:
        self._others_hold_memory = others_hold_memory
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None
        self._closed: Exception | None = None

    def submit(self, work: Work, on_progress: Callable[[Any], object]) -> Future[Any]:
        """Queue ``work``. What it yields goes to ``on_progress`` on the generation thread, what it returns
        into the future. Cancelling the future closes the generator before its next step."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
            else:
                self._queue.append((work, future, on_progress))
        return future

    def advance(self) -> bool:
        """Run one step of the work at the front; false when there is none."""
        with self._lock:
            if not self._queue:
                return False
            self._current = job = self._queue.popleft()
        work, future, on_progress = job
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
        job[0].close()
        self._settle(job[1], error=self._closed)

    def close(self, error: Exception) -> None:
        """Fail everything queued, now and later: the thread that would run it is gone, or stalls inside a step."""
        with self._lock:
            self._closed = error
            queue, self._queue = self._queue, deque()
            current = self._current
        for work, future, _ in queue:
            work.close()
            self._settle(future, error=error)
        if current is not None:
            self._settle(current[1], error=error)  # its generator may be running: the thread that runs it closes it

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
