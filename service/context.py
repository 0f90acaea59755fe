"""What is known of the HTTP request being answered, for whoever works on it: its id, its tenant, how it ended.

A context variable and not an argument, so that isolation and logs hold on routes that know nothing of them.
"""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field

ANONYMOUS = "anonymous"
"""The one tenant of a server without API keys."""


@dataclass
class RequestContext:
    """One request. ``tenant`` stands for its API key and is no secret; ``error_code`` is set when it fails.

    It may take ``timeout_s`` seconds from ``started`` on the monotonic clock. ``cleanup`` runs when the answer is
    complete or given up, whatever the route did.
    """

    request_id: str
    tenant: str = ANONYMOUS
    timeout_s: float | None = None
    started: float = field(default_factory=time.monotonic)
    cleanup: ExitStack = field(default_factory=ExitStack)
    error_code: str | None = None


_current: ContextVar[RequestContext | None] = ContextVar("ropeway_request", default=None)


def current() -> RequestContext:
    """The request being answered; a blank one outside of any."""
    return _current.get() or RequestContext("")


def enter(context: RequestContext) -> None:
    """Make ``context`` the current one for this task and the tasks it starts."""
    _current.set(context)


def new_id() -> str:
    """An identifier that nobody guesses."""
    return uuid.uuid4().hex
