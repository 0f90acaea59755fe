"""Slots for the encodings in use: each tenant has its share, and who finds none waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from patches import ResolvedRecipe, SlotsExhausted, SlotTable
from service import context
from service.sharing.admission import Admission, Ticket

RETRY_S = 0.01

MAX_WAITING = 1 << 20
"""Requests that wait for a slot hold memory already, which bounds their number."""


class EncodingsInUse:
    """Counts an encoding once per tenant that uses it, so the table of ``slots`` never runs out."""

    def __init__(self, slots: SlotTable, *, shared: bool) -> None:
        self._slots = slots
        self._room = Admission(slots.capacity, MAX_WAITING, shared=shared)
        self._tickets: dict[tuple[str, ResolvedRecipe], Ticket] = {}
        self._users: Counter[tuple[str, ResolvedRecipe]] = Counter()

    @asynccontextmanager
    async def slot(self, resolved: ResolvedRecipe) -> AsyncIterator[int]:
        """The slot of ``resolved``, held inside; waits for one while the tenant has its share or all are taken."""
        key = context.current().tenant, resolved
        if key not in self._tickets:
            (self._tickets[key],) = self._room.enter([1])
        ticket = self._tickets[key]
        self._users[key] += 1
        try:
            await ticket.granted.wait()
            slot = await self._acquired(resolved)
            try:
                yield slot
            finally:
                self._slots.release(slot)
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._tickets[key]
                ticket.leave()

    async def _acquired(self, resolved: ResolvedRecipe) -> int:
        while True:
            try:
                return self._slots.acquire(resolved)
            except SlotsExhausted:  # cancelled work keeps its slot until the generation thread closes it
                await asyncio.sleep(RETRY_S)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Room for one encoding at a time inside, whichever that is: work that acquires its slots by itself."""
        (ticket,) = self._room.enter([1])
        with ticket:
            await ticket.granted.wait()
            yield
