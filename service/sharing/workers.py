"""Everything that is not the model's: plans and tokenization on threads, pictures and reports in processes.

Both are few, wait in a bounded queue, and are shared between tenants. Work whose caller has gone is stopped, and its
place is given back when it really has ended. Probes and the end of service use neither.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from fastapi.concurrency import run_in_threadpool

from service.machine.heap import trim
from service.sharing.admission import Admission, Ticket
from service.sharing.child import Child, ChildFailed
from service.sharing.stopping import Baton, Manners, with_manners

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

LONG_S = 0.25
"""Work that takes longer has used memory that is worth giving back."""

SMALL = 16 << 10
"""Size of an input that takes some milliseconds."""

MAX_WAITING = 64
"""Calls of one tenant that wait for a thread, and as many for a process."""


class Workers:
    """Bounded threads and processes of one server; ``busy`` is true while a generation runs. Create, use and close it
    on one event loop."""

    def __init__(
        self,
        *,
        shared: bool,
        threads: int = 4,
        processes: int | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._busy, self._baton = busy, Baton()
        processes = processes or max(1, min(4, (os.cpu_count() or 1)))
        self._threads = Admission(threads, MAX_WAITING, shared=shared, of="a thread")
        self._processes = Admission(processes, MAX_WAITING, shared=shared, of="a process")
        self._pools = {
            self._threads: ThreadPoolExecutor(threads, "ropeway-worker"),
            self._processes: ThreadPoolExecutor(processes, "ropeway-child"),
        }
        self._stops: set[Callable[[], None]] = set()

    async def run(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Returned:
        """``function(*args)`` on a thread. Cancelling the caller stops it where it calls ``check_wanted``.

        Raises:
            QueueFull: when too many calls of the tenant wait already.
        """
        stop = threading.Event()

        def work() -> Returned:
            began = time.monotonic()
            try:
                with with_manners(Manners(stop, self._baton, self._busy)):
                    return function(*args, **options)
            finally:
                if time.monotonic() - began > LONG_S:
                    trim()

        result: Returned = await self._done(self._threads, work, stop.set)
        return result

    async def run_sized(self, size: int, function: Callable[[], Returned]) -> Returned:
        """``function()`` for an input of ``size`` characters or numbers: small ones do not queue with the long."""
        return await (run_in_threadpool(function) if size <= SMALL else self.run(function))

    async def render(self, function: Callable[Parameters, Returned], *args: Parameters.args) -> Returned:  # type: ignore[valid-type]
        """``function(*args)`` in a child process. Cancelling the caller kills it.

        Raises:
            QueueFull: when too many calls of the tenant wait already.
            ChildFailed: when it raises, or needs more memory than it may have.
        """
        child = Child(function, *args)
        result: Returned = await self._done(self._processes, child.run, child.kill)
        return result

    async def _done(self, room: Admission, work: Callable[[], Any], stop: Callable[[], None]) -> Any:
        (ticket,) = room.enter([1])
        try:
            await ticket.granted.wait()
            future = self._pools[room].submit(contextvars.copy_context().run, work)
        except BaseException:
            ticket.leave()
            raise
        self._stops.add(stop)
        future.add_done_callback(_on_this_loop(self._ended, ticket, stop))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            stop()
            raise

    def _ended(self, ticket: Ticket, stop: Callable[[], None]) -> None:
        ticket.leave()
        self._stops.discard(stop)

    def close(self) -> None:
        """Stop what runs, without waiting for it."""
        for stop in list(self._stops):
            stop()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _on_this_loop(function: Callable[..., None], *args: Any) -> Callable[[Future[Any]], None]:
    """A callback for another thread that calls ``function(*args)`` on this event loop, if that still runs."""
    loop = asyncio.get_running_loop()

    def call(_: Future[Any]) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function, *args)

    return call


__all__ = ["ChildFailed", "Workers"]
