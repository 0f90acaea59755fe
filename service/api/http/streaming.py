"""Server-sent events, and ending work when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from service import context
from service.api.errors import report
from service.errors import ApiError, ClientGone, body_of, deadline_exceeded

T = TypeVar("T")
Emit = Callable[..., None]
Failed = Callable[[ApiError], tuple[Any, ...]]
"""Arguments of ``event`` for a failure."""

PING_S = 5.0
"""A comment this often keeps proxies and clients from giving up on a long prefill."""


@asynccontextmanager
async def before_deadline() -> AsyncIterator[None]:
    """Cancels what is inside when the current request has taken the time it may take.

    Raises:
        ApiError: 504, when that happened.
    """
    current = context.current()
    outer, current.limit = current.limit, asyncio.timeout(current.seconds_left())
    try:
        async with (limit := current.limit):
            yield
    except TimeoutError:
        if limit.expired():
            raise deadline_exceeded(current.timeout_s or 0.0) from None
        raise
    finally:
        current.limit = outer


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Result of ``work``, which is cancelled as soon as the client disconnects or the request's time is up.

    Raises:
        ClientGone: when the client has gone; ApiError 504 when the time was up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        async with before_deadline():
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


def event(data: Any, name: str | None = None, number: int | None = None) -> str:
    """One event; ``data`` is a JSON value or an already encoded string. A client that lost the connection names the
    last ``number`` that it has seen."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    head = (f"event: {name}\n" if name else "") + ("" if number is None else f"id: {number}\n")
    return f"{head}data: {text}\n\n"


DONE = event("[DONE]")
"""The last event of OpenAI's streams."""


def as_it_is(error: ApiError) -> tuple[Any, ...]:
    """The last event of a stream that fails, by default."""
    return (body_of(error),)


def event_stream(
    work: Callable[[Emit], Awaitable[None]], failed: Failed = as_it_is, last: str = DONE
) -> StreamingResponse:
    """Stream what ``work`` emits, as ``emit(data, name=None, number=None)``, then ``last``.

    A failure becomes a last event, as ``failed`` says it: ``{"error": ...}``. Closing the stream cancels ``work``.
    """
    events = _events(work, failed, last)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _events(
    work: Callable[[Emit], Awaitable[None]], failed: Failed = as_it_is, last: str = DONE
) -> AsyncIterator[str]:
    queue: asyncio.Queue[str | None] = asyncio.Queue()

    async def run() -> None:
        try:
            async with before_deadline():
                await work(lambda *told: queue.put_nowait(event(*told)))
        except Exception as error:
            queue.put_nowait(event(*failed(report(error))))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    items = [await queue.get()]
            except TimeoutError:
                yield ": ping\n\n"
                continue
            while not queue.empty():
                items.append(queue.get_nowait())
            ends = None in items
            if ends:  # behind the end, the generation thread may still have reported progress
                items = items[: items.index(None)]
            text = "".join(item for item in items if item is not None)
            if text:
                yield text  # in one message: each costs a system call
            if ends:
                break
        if last:
            yield last
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
