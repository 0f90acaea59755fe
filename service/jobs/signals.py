"""Wake-ups on one event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Signal:
    """A repeated event. Take ``next`` before reading the state that it announces: then no change is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set when it happens the next time."""
        return self._event

    def fire(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()


async def within(event: asyncio.Event, timeout_s: float) -> None:
    """Until ``event`` is set, for ``timeout_s`` seconds at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
