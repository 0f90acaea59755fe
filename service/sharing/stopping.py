"""Ending work on a thread: nobody can kill a thread, so long work asks now and then whether it is still wanted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_stop: ContextVar[threading.Event | None] = ContextVar("ropeway_stop", default=None)


class Stopped(RuntimeError):
    """Nobody waits for this work any more."""


@contextmanager
def stopped_by(event: threading.Event) -> Iterator[None]:
    """Inside, ``check_wanted`` raises once ``event`` is set."""
    token = _stop.set(event)
    try:
        yield
    finally:
        _stop.reset(token)


def check_wanted() -> None:
    """Call it in every loop that can take longer than a moment.

    Raises:
        Stopped: when the caller's result is no longer wanted.
    """
    event = _stop.get()
    if event is not None and event.is_set():
        raise Stopped("nobody waits for this work any more")
