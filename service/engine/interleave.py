"""Long work in short steps: generators advanced by the generation thread between two of its steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

Work = Generator[Any, None, Any]


class Interleaved:
    """Round-robin over generators. Each ``next`` must be short: it delays every running request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Work, Future[Any], Callable[[Any], object]]] = deque()
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
            work, future, on_progress = self._queue.popleft()
        if future.cancelled():
            work.close()
            return True
        try:
            on_progress(next(work))
        except StopIteration as stop:
            _finish(future, stop.value)
        except Exception as error:
            _fail(future, error)
        else:
            with self._lock:
                if self._closed is None:
                    self._queue.append((work, future, on_progress))
                else:
                    _fail(future, self._closed)
        return True

    def close(self, error: Exception) -> None:
        """Fail everything queued, now and later: the thread that would run it is gone."""
        with self._lock:
            self._closed = error
            queue, self._queue = self._queue, deque()
        for work, future, _ in queue:
            work.close()
            _fail(future, error)

    def __len__(self) -> int:
        return len(self._queue)


def _finish(future: Future[Any], value: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def _fail(future: Future[Any], error: Exception) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)
