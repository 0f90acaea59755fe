"""Threads for the database only: a hanging call delays neither generation nor probes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import structlog

from service.jobs.database.opening import CONNECTIONS, StoreOutOfReach

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

THREAD_NAME = "ropeway-store"
"""Start of the names of these threads. One that hangs must not hold the end of the process."""

RETRY_S = 0.5
"""Seconds until a full queue, a restarting engine or a database out of reach is tried again."""

LONGEST_RETRY_S = 5.0
"""The wait doubles up to this, for a database that stays out of reach."""

log = structlog.get_logger()


class StoreCalls:
    """Calls of the store from one event loop, as many at a time as the database has ``connections``."""

    def __init__(self, connections: int = CONNECTIONS) -> None:
        self._threads = ThreadPoolExecutor(connections, THREAD_NAME)

    def begun(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> asyncio.Future[Returned]:
        """The running call, which does not end with its caller."""
        work = contextvars.copy_context().run
        return asyncio.wrap_future(self._threads.submit(work, lambda: function(*args, **options)))

    async def within(
        self,
        seconds: float,
        function: Callable[Parameters, Returned],
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Returned:
        """The call's value.

        Raises:
            StoreOutOfReach: when there is none after so many seconds; and whatever the store raises.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self.begun(function, *args, **options)
        except TimeoutError:
            raise StoreOutOfReach(f"no answer within {seconds:g} seconds") from None

    def close(self) -> None:
        """End the threads; hanging calls are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class PatientCalls:
    """Calls of the store that are never abandoned once begun, and wait for a database out of reach.

    A call that succeeds says nothing of the others: a full disk refuses writes only. The log has the beginning and the
    end of such a time.
    """

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls
        self._begun: set[asyncio.Future[Any]] = set()
        self._retried = 0

    @property
    def out_of_reach(self) -> bool:
        """True while a call has got no answer of the database, and waits for one."""
        return self._retried > 0

    async def __call__(
        self, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Returned:
        wait_s, retried = RETRY_S, False
        try:
            while True:
                call = self._calls.begun(function, *args, **options)
                self._begun.add(call)
                call.add_done_callback(self._begun.discard)
                try:
                    answer = await asyncio.shield(call)
                    break
                except StoreOutOfReach as error:
                    if not self.out_of_reach:
                        log.warning("jobs_out_of_reach", error=str(error))
                    self._retried += not retried
                    retried = True
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        finally:
            self._retried -= retried
        if retried and not self.out_of_reach:
            log.info("jobs_within_reach")
        return answer

    async def settle(self, timeout_s: float) -> None:
        """Wait for calls whose callers have gone, for ``timeout_s`` seconds at most."""
        if self._begun:
            await asyncio.wait(self._begun, timeout=timeout_s)
