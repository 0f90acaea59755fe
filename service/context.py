"""The current HTTP request: its id, its tenant, its deadline, and its error.

A context variable and not an argument, so that isolation and logs hold on routes that know nothing of them.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

ANONYMOUS = "anonymous"
"""The one tenant of a server without API keys."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Request ids accepted from clients: no spaces, quotes or control characters reach the log."""


@dataclass
class RequestContext:
    """One request. ``tenant`` is derived from its API key and is no secret; ``error_code`` is set when it fails.

    It may take ``timeout_s`` seconds from ``started`` on the monotonic clock; ``limit`` cancels what runs then.
    ``cleanup`` runs when the answer is complete or given up, whatever the route did. ``headers`` are those of its
    answer, beside the ones that every answer has. ``shape`` makes the JSON of a failure, unless it is the usual one.
    """

    request_id: str
    tenant: str = ANONYMOUS
    timeout_s: float | None = None
    started: float = field(default_factory=time.monotonic)
    cleanup: ExitStack = field(default_factory=ExitStack)
    error_code: str | None = None
    limit: asyncio.Timeout | None = None
    headers: dict[str, str] = field(default_factory=dict)
    shape: Callable[[Any], dict[str, Any]] | None = None

    def seconds_left(self) -> float | None:
        return None if self.timeout_s is None else self.started + self.timeout_s - time.monotonic()

    def allow(self, timeout_s: float | None) -> None:
        """Let the request take so many seconds from its start, whatever was said before; None: any time."""
        self.timeout_s = timeout_s
        if self.limit is not None:
            left = self.seconds_left()
            self.limit.reschedule(None if left is None else asyncio.get_running_loop().time() + left)


_current: ContextVar[RequestContext | None] = ContextVar("ropeway_request", default=None)


def current() -> RequestContext:
    """The request being answered; a blank one outside of any."""
    return _current.get() or RequestContext("")


def enter(context: RequestContext) -> None:
    """Make ``context`` the current one for this task and the tasks it starts."""
    _current.set(context)


@contextmanager
def acting_for(tenant: str) -> Iterator[None]:
    """Inside, work counts as that of ``tenant``, outside of any request."""
    token = _current.set(RequestContext("", tenant))
    try:
        yield
    finally:
        _current.reset(token)


def accepted_id(given: str) -> str:
    """The client's request id, or a new one where it is empty or has other characters."""
    return given if REQUEST_ID.fullmatch(given) else new_id()


def new_id() -> str:
    """A random identifier."""
    return uuid.uuid4().hex
