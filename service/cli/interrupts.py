"""Ctrl-C outside of commands: while they are imported, and after their end."""

from __future__ import annotations

import os
import signal


def end_at_once(number: int, _: object) -> None:
    """A handler of a signal: the process ends without a word. Python would print a traceback."""
    os._exit(128 + number)


def be_quiet() -> None:
    """From here on, Ctrl-C ends the process at once. It stays ignored if it is, as in the background of a script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def be_heard() -> None:
    """From here on, Ctrl-C raises ``KeyboardInterrupt`` again."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
