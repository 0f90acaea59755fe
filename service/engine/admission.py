"""Memory is promised before work is accepted: reserve what a request may grow to, or wait, or refuse."""

from __future__ import annotations

import asyncio
from collections import deque


class TooLarge(ValueError):
    """The request can never fit. ``needed`` and ``capacity`` are in tokens."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"{needed} tokens are needed and {capacity} is the most that fits")
        self.needed, self.capacity = needed, capacity


class QueueFull(RuntimeError):
    """Too many requests wait already: try again later."""


class Admission:
    """A first-come budget of ``capacity`` tokens in units of ``unit``, with at most ``max_waiting`` waiters.

    Used from one event loop only.
    """

    def __init__(self, capacity: int, max_waiting: int, unit: int = 1) -> None:
        self.capacity, self.max_waiting, self.unit = capacity, max_waiting, unit
        self.reserved = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.unit) * self.unit

    def check(self, tokens: int) -> None:
        """Raises:
        TooLarge: when ``tokens`` can never fit.
        """
        if self.rounded(tokens) > self.capacity:
            raise TooLarge(tokens, self.capacity)

    async def acquire(self, tokens: int) -> int:
        """Reserve ``tokens``, waiting in turn; returns what to give to ``release``.

        Raises:
            TooLarge: when it can never fit.
            QueueFull: when ``max_waiting`` requests wait already.
        """
        self.check(tokens)
        needed = self.rounded(tokens)
        if not self._waiters and self.reserved + needed <= self.capacity:
            self.reserved += needed
            return needed
        if len(self._waiters) >= self.max_waiting:
            raise QueueFull(f"{len(self._waiters)} requests are waiting for memory")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((needed, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(needed)  # granted in the same tick in which the caller went away
            else:
                self._waiters = deque(waiter for waiter in self._waiters if waiter[1] is not turn)
                self._grant()
            raise
        return needed

    def release(self, needed: int) -> None:
        """Give back what ``acquire`` returned."""
        self.reserved -= needed
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.reserved + self._waiters[0][0] <= self.capacity:
            needed, turn = self._waiters.popleft()
            if not turn.cancelled():
                self.reserved += needed
                turn.set_result(None)
