"""Ctrl-C outside of commands: while they are imported, and after their end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def end_at_once(number: int, _: object) -> None:
    """A handler of a signal: the process ends without a word. Python would print a traceback."""
    os._exit(128 + number)


def be_quiet() -> None:
    """From here on, Ctrl-C ends the process at once. It stays ignored if it is, as in the background of a script."""
    if _raises():
        sys.stdout.flush()  # the text printed so far would be lost
        signal.signal(signal.SIGINT, end_at_once)


def be_heard() -> None:
    """From here on, Ctrl-C raises ``KeyboardInterrupt`` again."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ending_with(word: Callable[[], None]) -> Iterator[None]:
    """Inside, Ctrl-C calls ``word`` and ends the process.

    An exception could get lost: Python drops it in a ``__del__``, and libraries catch it around an import.
    """
    if not _raises():
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(number, end_at_once)
        try:
            word()
        finally:
            end_at_once(number, frame)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raises() -> bool:
    """Ctrl-C raises ``KeyboardInterrupt`` in this thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
