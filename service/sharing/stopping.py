"""Rules for long work on a thread: it stops when its caller has gone, and leaves the interpreter to generation.

Threads cannot be killed. Every step of a generation needs the interpreter hundreds of times. Each time, the step waits
in a queue with every thread that computes in Python. So one thread computes at a time, by turns, and calls
``check_wanted`` in its loops.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

SLICE_S = 0.005
"""Seconds that a thread works before the next one does. While a generation runs, all of them rest twice as long."""


class Stopped(RuntimeError):
    """The caller of this work has gone."""


class Baton:
    """Held by the one of several threads that computes in Python; who has waited longest is next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Event] = deque()

    def take(self) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def give(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._held = False


@dataclass
class Manners:
    """The signals to one piece of work on a thread. ``busy`` is true while a generation runs."""

    stop: threading.Event
    baton: Baton = field(default_factory=Baton)
    busy: Callable[[], bool] = lambda: False
    outside: bool = False
    began: float = 0.0

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped("the caller of this work has gone")
        if time.monotonic() - self.began > SLICE_S and not self.outside:
            self.rest()
            self.baton.give()
            self.baton.take()
            self.began = time.monotonic()

    def rest(self) -> None:
        """While a generation runs, leave the interpreter to it for twice as long as this thread had it."""
        if self.busy():
            time.sleep(min(2 * (time.monotonic() - self.began), 20 * SLICE_S))


_manners: ContextVar[Manners | None] = ContextVar("ropeway_manners", default=None)


@contextmanager
def with_manners(manners: Manners) -> Iterator[None]:
    """Inside, the thread has the baton, and ``check_wanted`` obeys ``manners``."""
    token = _manners.set(manners)
    manners.baton.take()
    manners.began = time.monotonic()
    try:
        yield
    finally:
        manners.rest()
        manners.baton.give()
        _manners.reset(token)


@contextmanager
def outside_python() -> Iterator[None]:
    """Inside, the thread waits, or computes without the interpreter: others may compute in Python."""
    manners = _manners.get()
    if manners is None:
        yield
        return
    manners.baton.give()
    manners.outside = True
    try:
        yield
    finally:
        manners.baton.take()
        manners.outside = False


def check_wanted() -> None:
    """Call it in every loop that can take longer than a moment.

    Raises:
        Stopped: when the caller's result is no longer wanted.
    """
    manners = _manners.get()
    if manners is not None:
        manners.check()
