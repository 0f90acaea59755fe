"""Reasons of a failed start, from the messages of Serve, which are tracebacks. No Ray here."""

from __future__ import annotations

import re

OURS = re.compile(r"service\.scale\.[\w.]+: (.+)")
"""The last line of a traceback of our exceptions, whose messages are for people."""


class NotStarted(RuntimeError):
    """A replica that cannot start; the message is one line with the reason."""


def last_line(message: str) -> str:
    """The last line of ``message`` with text; in a traceback, the one with the error."""
    return next((line.strip() for line in reversed(message.splitlines()) if line.strip()), "")


def reason_in(message: str) -> str:
    """The reason that a replica or our configuration gave, in a message of Serve; "" for another end."""
    found = OURS.fullmatch(last_line(message))
    return "" if found is None else found[1]
