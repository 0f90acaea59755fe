"""Server-sent events, and ending work when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import structlog
from fastapi import Request
from fastapi.responses import StreamingResponse

from service.errors import ApiError, as_api_error, body_of

T = TypeVar("T")
Emit = Callable[..., None]

PING_S = 5.0
"""A comment this often keeps proxies and clients from giving up on a long prefill."""

log = structlog.get_logger()


class ClientGone(Exception):
    """The client closed the connection: nobody reads an answer any more."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Result of ``work``, which is cancelled as soon as the client disconnects.

    Raises:
        ClientGone: when that happened.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: Any, name: str | None = None) -> str:
    """One event; ``data`` is a JSON value or an already encoded string."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def event_stream(work: Callable[[Emit], Awaitable[None]]) -> StreamingResponse:
    """Stream what ``work`` emits, as ``emit(data, name=None)``, then ``[DONE]``.

    A failure becomes a last ``{"error": ...}`` event. Closing the stream cancels ``work``.
    """
    return StreamingResponse(_events(work), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(work: Callable[[Emit], Awaitable[None]]) -> AsyncIterator[str]:
    queue: asyncio.Queue[str | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await work(lambda data, name=None: queue.put_nowait(event(data, name)))
        except Exception as error:
            answer: ApiError = as_api_error(error)
            if answer.status >= 500:
                log.error("stream_failed", code=answer.code, exc_info=error)
            queue.put_nowait(event(body_of(answer)))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while True:
            try:
                item = await asyncio.wait_for(queue.get(), PING_S)
            except TimeoutError:
                yield ": ping\n\n"
                continue
            if item is None:
                break
            yield item
        yield event("[DONE]")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
