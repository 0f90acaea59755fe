"""Limits on connections: their number, their idle time, and the time for an unread answer.

uvicorn alone waits for the first request, and for the last byte to be read, without limit.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.http.descriptors import BACKLOG
from service.settings import Settings

HEAD_S = 15.0
"""Seconds that the head of a request may take to arrive."""

STILL_S = 1.0
"""Seconds without a byte after which a body or a reader gives way to a new connection."""

FLUSH_S = 1.0
"""Extra seconds for an unread answer after its request has timed out."""


class BoundedConnection(H11Protocol):
    """One connection. Beyond ``most``, the one that ``waits`` is closed, or the new one where all work."""

    most: int
    unread_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self._received = time.monotonic()
        self._paused: float | None = None
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        if len(self.connections) > self.most:
            self._make_room()
        self._await_head()

    @property
    def is_idle(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def waits(self) -> tuple[int, float] | None:
        """Its order among those that may be closed, with the time since which it waits; None while it works.

        Idle connections come first, then answers that nobody reads, then bodies that do not come.
        """
        if self.is_idle:
            return 0, self.idle_since
        still = time.monotonic() - STILL_S
        if self._paused is not None and self._paused < still:
            return 1, self._paused
        return (2, self._received) if self.cycle.more_body and self._received < still else None

    def _make_room(self) -> None:
        others = [other for other in self.connections if isinstance(other, BoundedConnection) and other is not self]
        waiting = [(waits, other) for other in others if (waits := other.waits) is not None]
        closed = min(waiting, key=lambda each: each[0], default=(None, self))[1]
        self.connections.discard(closed)
        closed.transport.abort()

    def _await_head(self) -> None:
        if self._head is None and self.is_idle:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)
        elif self._head is not None and not self.is_idle:
            self._head.cancel()
            self._head = None

    def data_received(self, data: bytes) -> None:
        self._received = time.monotonic()
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def pause_writing(self) -> None:
        self._paused = time.monotonic()
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        self._paused = None
        super().resume_writing()
        if self._unread is not None and not self.transport.is_closing():
            self._unread.cancel()
            self._unread = None

    def _abort_later(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def connection_class(settings: Settings) -> type[BoundedConnection]:
    """uvicorn's protocol class with the limits of ``settings``."""
    limits = {"most": settings.max_connections, "unread_s": settings.send_timeout_s + FLUSH_S}
    return type("Connection", (BoundedConnection,), limits)


def connection_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's options for connections."""
    return {"http": connection_class(settings), "ws": "none", "backlog": BACKLOG}
