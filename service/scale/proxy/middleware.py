"""Middleware in Serve's proxy, before a replica is chosen. No torch here: every node runs a proxy.

It gives requests with the same prompt start one key, by which the router chooses the replica. It keeps one request id
where Serve adds a second. Serve's own failures, which are plain text or no answer at all, get the error shape of the
service. Replicas mark each of their answers, so both can be distinguished. ``GET /metrics`` asks all replicas.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from hashlib import sha256
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import anthropic_failures
from service.context import accepted_id
from service.errors import ApiError, body_of
from service.scale.private_names import AFFINITY_HEADER
from service.scale.proxy import metrics
from service.scale.proxy.affinity import READ_BYTES, affinity_key

OURS = "x-content-type-options"
"""A header of every answer of a replica."""

OF_SERVE = "/-/"
"""Paths of Serve's own probes."""

REMOVED = (AFFINITY_HEADER, "x-request-timeout-seconds", "x-request-disconnect-disabled", "serve_multiplexed_model_id")
"""Request headers that steer Serve: no client may send them."""

ROUTED = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", anthropic_failures.PATH)
"""Paths whose prompts have cached prefixes."""

READ_S = 2.0
"""Seconds that the start of a body may take; a slower request goes to any replica."""

NO_REPLICA = ApiError(503, "no replica is ready: try again", code="no_replica")
REPLICA_LOST = ApiError(503, "the replica ended before it answered: try again", code="replica_lost")
LOST_IN_STREAM = ApiError(503, "the replica ended before its answer was complete", code="replica_lost")


class Front:
    """ASGI middleware around Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OF_SERVE):
            await self.app(scope, receive, send)
            return
        request_id = accepted_id(Headers(scope=scope).get("x-request-id", ""))
        if metrics.known is not None and not metrics.known:
            # Serve would wait for a replica without a bound.
            await _Answer(send, request_id, scope).refuse(NO_REPLICA)
            return
        scope = {**scope, "headers": list(scope["headers"])}
        headers = MutableHeaders(scope=scope)
        for name in _sent(headers, REMOVED):
            del headers[name]
        headers["x-request-id"] = request_id
        if scope["method"] == "GET" and scope["path"] == metrics.PATH:
            text = await metrics.of_all(self.app, scope)
            if text is not None:
                await _send_whole(send, 200, text, request_id, {"content-type": metrics.TYPE})
                return
        if scope["method"] == "POST" and scope["path"] in ROUTED:
            start = _Start(receive)
            await start.read()
            receive = start.receive
            credentials = f"{headers.get('authorization')} {headers.get('x-api-key')}"
            key = affinity_key(start.head, sha256(credentials.encode()).hexdigest())
            if key is not None:
                headers[AFFINITY_HEADER] = key
        answer = _Answer(send, request_id, scope)
        try:
            await self.app(scope, receive, answer.send)
        except Exception:
            if answer.started and not answer.is_events:
                raise  # the connection is cut, so that the answer does not look complete
        await answer.end()


class _Start:
    """Reads the start of a body, and gives it to the replica with the rest."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []

    @property
    def head(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages)[:READ_BYTES]

    async def read(self) -> None:
        """Read as many bytes as the key needs; less from a client that is slow or has gone."""
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                while more and size < READ_BYTES:
                    message = await self._receive()
                    self._messages.append(message)
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)

    async def receive(self) -> Message:
        return self._messages.pop(0) if self._messages else await self._receive()


def _sent(headers: Headers, names: tuple[str, ...]) -> list[str]:
    """Names among ``headers`` that Serve reads as one of ``names``: it takes `-` and `_` for the same."""
    meant = {name.replace("_", "-") for name in names}
    return [name for name in set(headers.keys()) if name.replace("_", "-") in meant]


class _Answer:
    """Passes a replica's answer on, and replaces or completes what a replica did not answer."""

    def __init__(self, send: Send, request_id: str, scope: Scope) -> None:
        self._send, self._request_id = send, request_id
        self._is_anthropic = anthropic_failures.is_of(scope["path"], Headers(scope=scope))
        self.started = self.is_events = self._complete = self._replaced = False

    async def send(self, message: Message) -> None:
        if self._replaced:
            return  # the rest of a text of Serve's
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            if OURS not in headers:
                self._replaced = True
                await self.refuse(REPLICA_LOST if message["status"] == 500 else NO_REPLICA)
                return
            self.started = True
            self.is_events = headers.get("content-type", "").startswith("text/event-stream")
            message = {**message, "headers": list(message["headers"])}
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        elif message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Answer where no replica did, and end a stream of events with an error.

        Other answers stay incomplete, which cuts the connection.
        """
        if not self.started:
            await self.refuse(REPLICA_LOST)
        elif self.is_events and not self._complete:
            event = f"data: {json.dumps(self._body(LOST_IN_STREAM))}\n\n"
            event = f"event: error\n{event}" if self._is_anthropic else f"{event}data: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event.encode()})

    async def refuse(self, error: ApiError) -> None:
        """Send ``error`` as the answer, unless one is complete."""
        if self._complete:
            return
        self.started = self._complete = True
        body = json.dumps(self._body(error)).encode()
        headers = {"content-type": "application/json", "retry-after": "1"}
        if self._is_anthropic:
            headers[anthropic_failures.ID_HEADER] = self._request_id
        await _send_whole(self._send, error.status, body, self._request_id, headers)

    def _body(self, error: ApiError) -> dict[str, Any]:
        return anthropic_failures.failure_of(error, self._request_id) if self._is_anthropic else body_of(error)


async def _send_whole(send: Send, status: int, body: bytes, request_id: str, headers: dict[str, str]) -> None:
    headers = headers | {"content-length": str(len(body)), "x-request-id": request_id, OURS: "nosniff"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def middleware() -> list[Middleware]:
    """Middleware for Serve's proxy, loaded by import path."""
    return [Middleware(Front)]
