"""Manners of long work on a thread: it stops when nobody waits for it, and leaves the interpreter to generation.

Nobody can kill a thread, and every step of a generation needs the interpreter hundreds of times. So long work calls
``check_wanted`` in its loops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

SLICE_S = 0.005
"""How long a thread works before it sleeps, while a generation runs; it sleeps as long."""


class Stopped(RuntimeError):
    """Nobody waits for this work any more."""


@dataclass
class Manners:
    """What one piece of work on a thread listens to. ``busy`` tells whether a generation runs."""

    stop: threading.Event
    busy: Callable[[], bool] = lambda: False
    began: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped("nobody waits for this work any more")
        worked = time.monotonic() - self.began
        if worked > SLICE_S:
            if self.busy():
                time.sleep(min(worked, 10 * SLICE_S))
            self.began = time.monotonic()


_manners: ContextVar[Manners | None] = ContextVar("ropeway_manners", default=None)


@contextmanager
def with_manners(manners: Manners) -> Iterator[None]:
    """Inside, ``check_wanted`` obeys ``manners``."""
    token = _manners.set(manners)
    try:
        yield
    finally:
        _manners.reset(token)


def check_wanted() -> None:
    """Call it in every loop that can take longer than a moment.

    Raises:
        Stopped: when the caller's result is no longer wanted.
    """
    manners = _manners.get()
    if manners is not None:
        manners.check()
