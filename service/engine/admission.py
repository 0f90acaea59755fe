"""Memory is promised before work is accepted: reserve what a request may grow to, or wait, or refuse.

A request is checked and counted in one step, before it is tokenized: otherwise a burst would pass the check
together, pay for tokenization, and be refused after it (vllm#58192). Its length is not known then, so it enters with
an upper bound, the bytes of its text (a token covers at least one byte), and ``Ticket.resize`` puts the true
number in its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType


class TooLarge(ValueError):
    """The request can never fit. ``needed`` and ``capacity`` are in tokens."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"{needed} tokens are needed and {capacity} is the most that fits")
        self.needed, self.capacity = needed, capacity


class QueueFull(RuntimeError):
    """Too much waits already: try again later."""


class Ticket:
    """Memory for one sequence: waited for, then held until ``leave``. A context manager that leaves."""

    def __init__(self, admission: Admission, party: object, needed: int) -> None:
        self._admission, self.party, self.needed = admission, party, needed
        self.granted = asyncio.Event()
        self._left = False

    def resize(self, tokens: int) -> None:
        """Need ``tokens`` instead. Memory already granted shrinks at once; what it cannot grow by is waited for
        at the head of the queue.

        Raises:
            TooLarge: when it can never fit.
        """
        self._admission.resize(self, tokens)

    def leave(self) -> None:
        """Give back the memory or the place in the queue. Safe to repeat."""
        if not self._left:
            self._left = True
            self._admission.leave(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()


class Admission:
    """A first-come budget of ``capacity`` tokens in units of ``unit``.

    At most ``max_waiting`` requests and ``max_waiting_tokens`` tokens wait; the sequences of one request count as
    one. A request that finds the queue empty may always wait, so that none is refused for its size for ever.
    Used from one event loop only.
    """

    def __init__(self, capacity: int, max_waiting: int, unit: int = 1, max_waiting_tokens: int | None = None) -> None:
        self.capacity, self.max_waiting, self.unit = capacity, max_waiting, unit
        self.max_waiting_tokens = max_waiting_tokens
        self.reserved = 0
        self._queue: deque[Ticket] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return sum(ticket.needed for ticket in self._queue)

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.unit) * self.unit

    def check(self, tokens: int) -> None:
        """Raises:
        TooLarge: when ``tokens`` can never fit.
        """
        if self.rounded(tokens) > self.capacity:
            raise TooLarge(tokens, self.capacity)

    def check_room(self, sizes: Sequence[int]) -> None:
        """Raises:
        QueueFull: when a request with sequences of these ``sizes`` would neither run now nor find a place.
        """
        if not self._queue:
            return
        parties = len({ticket.party for ticket in self._queue})
        if parties >= self.max_waiting:
            raise QueueFull(f"{parties} requests are waiting for memory")
        tokens = self.waiting_tokens
        if self.max_waiting_tokens is not None and tokens + self._bounded(sizes) > self.max_waiting_tokens:
            raise QueueFull(f"{tokens} tokens are waiting for memory")

    def _bounded(self, sizes: Sequence[int]) -> int:
        return sum(min(self.rounded(size), self.capacity) for size in sizes)

    def enter(self, sizes: Sequence[int]) -> list[Ticket]:
        """Tickets for the sequences of one request, all or none. A size is an upper bound: beyond the capacity it
        counts as the capacity.

        Raises:
            QueueFull: when there is no room and no place to wait.
        """
        self.check_room(sizes)
        party = object()
        tickets = [Ticket(self, party, self._bounded([size])) for size in sizes]
        self._queue.extend(tickets)
        self._grant()
        return tickets

    def resize(self, ticket: Ticket, tokens: int) -> None:
        self.check(tokens)
        needed = self.rounded(tokens)
        if ticket.granted.is_set():
            self.reserved -= ticket.needed
            if self.reserved + needed <= self.capacity:
                self.reserved += needed
            else:
                ticket.granted.clear()
                self._queue.appendleft(ticket)
        ticket.needed = needed
        self._grant()

    def leave(self, ticket: Ticket) -> None:
        if ticket.granted.is_set():
            self.reserved -= ticket.needed
        else:
            self._queue.remove(ticket)
        self._grant()

    def _grant(self) -> None:
        while self._queue and self.reserved + self._queue[0].needed <= self.capacity:
            ticket = self._queue.popleft()
            self.reserved += ticket.needed
            ticket.granted.set()
