"""The outermost layer around every request.

It adds the request id, one log line, one error shape for uncaught exceptions, and the headers of HTML pages. It limits
the time of unread answers, and refuses requests while the server drains.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import context, tracing
from service.anthropic_failures import adapt
from service.api.errors import answer
from service.api.http.access import OPEN
from service.api.http.connections import FLUSH_S
from service.context import RequestContext
from service.errors import CLIENT_CLOSED_REQUEST, CLIENT_DISCONNECTED, ClientTooSlow, shutting_down
from service.metrics import Metrics
from service.settings import Settings

NOTHING_LOADED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The policy of pages without one."""

LONGEST_PATH = 256
"""Characters of a path in the log."""

log = structlog.get_logger()


@dataclass
class Traffic:
    """Requests being answered, and whether new ones are still taken: not once ``drained`` is set."""

    in_flight: int = 0
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def draining(self) -> bool:
        return self.drained.is_set()

    async def ends(self, seconds: float) -> None:
        """Wait until nothing is in flight, at most this long."""
        until = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.02)


class RequestScope:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, traffic: Traffic) -> None:
        self.app, self.settings, self.metrics, self.traffic = app, settings, metrics, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = context.accepted_id(headers.get("x-request-id", ""))
        current = RequestContext(request_id, timeout_s=self.settings.max_timeout_s)
        adapt(current, scope["path"], headers)
        context.enter(current)
        structlog.contextvars.bind_contextvars(request_id=current.request_id)
        tracing.mark(current.request_id)
        reply = _Reply(send, current, self.settings.send_timeout_s)
        if OPEN.fullmatch(scope["path"]):
            await self._answer(scope, receive, reply)
            return
        self.traffic.in_flight += 1
        try:
            await self._answer(scope, receive, reply)
        finally:
            self.traffic.in_flight -= 1
            current.cleanup.close()
            self._log(scope, current, reply)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply) -> None:
        try:
            if self.traffic.draining and not OPEN.fullmatch(scope["path"]):
                await answer(shutting_down())(scope, receive, reply.send)
            else:
                await self.app(scope, receive, reply.send)
            if not reply.is_whole:  # a stream that ends early without an exception has lost its reader
                current = context.current()
                current.error_code = current.error_code or CLIENT_DISCONNECTED  # a failure that it did not read counts
                reply.status = CLIENT_CLOSED_REQUEST
        except ClientTooSlow:
            context.current().error_code = "client_too_slow"
            await _cut(receive)
        except Exception as error:
            failure = answer(error)
            if reply.status is not None:
                raise  # too late for an answer: the connection is cut, so that it does not look complete
            await failure(scope, receive, reply.send)

    def _log(self, scope: Scope, current: RequestContext, reply: _Reply) -> None:
        code = current.error_code
        if code is not None:
            self.metrics.rejected.labels(code).inc()
        log.info(
            "request",
            method=scope["method"],
            path=scope["path"][:LONGEST_PATH],
            status=reply.status or CLIENT_CLOSED_REQUEST,  # nothing was sent
            code=code,
            seconds=round(time.monotonic() - current.started, 4),
        )


async def _cut(receive: Receive) -> None:
    """Wait until the connection of an unread answer is aborted: an exception would be logged as the server's fault."""
    with suppress(TimeoutError):
        async with asyncio.timeout(2 * FLUSH_S):
            while (await receive())["type"] != "http.disconnect":
                pass


class _Reply:
    """Sends an answer with the headers of every answer, within the time that a client has to read it.

    ``status`` is for the log, None before the start. ``is_whole`` is true once the last part of the body was sent.
    """

    def __init__(self, send: Send, current: RequestContext, timeout_s: float) -> None:
        self._send, self._current, self._timeout_s = send, current, timeout_s
        self.status: int | None = None
        self.is_whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._current.request_id
            headers["x-content-type-options"] = "nosniff"
            if headers.get("content-type", "").startswith("text/html"):
                headers.setdefault("content-security-policy", NOTHING_LOADED)
                headers["x-frame-options"] = "DENY"
                headers["referrer-policy"] = "no-referrer"
            headers.update(self._current.headers)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._send(message)
            self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        except TimeoutError:
            if limit.expired():
                raise ClientTooSlow(f"nothing was read for {self._timeout_s:g} seconds") from None
            raise
