"""Memory is promised before work is accepted: reserve what a request may grow to, or wait, or refuse.

A request is checked and counted in one step, before it is tokenized. Otherwise a burst would pass the check together,
pay for tokenization, and be refused after it (vllm#58192). Its length is unknown then. The request enters with the
bytes of its text as an upper bound (a token covers at least one byte). ``Ticket.resize`` puts the true number in its
place.

Dynamic thresholds share the budget between tenants (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2),
1998). No tenant holds more than ``ALPHA`` times the free part, so one tenant alone leaves a quarter to the next.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType

from service import context
from service.sharing.pool import Pool

ALPHA = 3
"""A tenant of a shared budget holds at most this many times what is free."""

RESERVE = 16
"""This part of a shared budget is left to tenants that hold nothing: one in so many."""


class TooLarge(ValueError):
    """The request can never fit. ``needed`` and ``capacity`` are in the units of the budget, tokens for memory."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"{needed} tokens are needed and {capacity} is the most that fits")
        self.needed, self.capacity = needed, capacity


class QueueFull(RuntimeError):
    """Too much waits already: try again later."""


class Ticket:
    """A part of the budget: waited for, then held until ``leave``. A context manager that leaves."""

    _count = itertools.count()

    def __init__(self, admission: Admission, party: object, tenant: str, needed: int) -> None:
        self._admission, self.party, self.tenant, self.needed = admission, party, tenant, needed
        self.arrived = next(self._count)
        self.granted = asyncio.Event()
        self.overtaken = 0
        """Units granted to later tickets while this one waited for room."""
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


def in_share(held: int, needed: int, reserved: int, capacity: int) -> bool:
    """True if a tenant that holds ``held`` of the ``reserved`` units may hold ``needed`` more; always for its first."""
    free = capacity - reserved - needed - capacity // RESERVE
    return not held or held + needed <= ALPHA * free


def largest(capacity: int, unit: int = 1, *, shared: bool) -> int:
    """The largest size of one request to a budget of ``capacity``."""
    return max(capacity * ALPHA // (1 + ALPHA) // unit * unit, min(unit, capacity)) if shared else capacity


class Admission:
    """A budget of ``capacity`` in units of ``unit``, first come first served, or shared between tenants.

    At most ``max_waiting`` requests and ``max_waiting_tokens`` tokens wait, per tenant where the budget is ``shared``;
    the sequences of one request count as one. A tenant that finds none of its requests in the queue may always wait.
    So no request is refused for its size for ever. ``of`` names the budget in messages. Used from one event loop only.
    """

    def __init__(
        self,
        capacity: int,
        max_waiting: int,
        unit: int = 1,
        max_waiting_tokens: int | None = None,
        *,
        shared: bool = False,
        of: str = "memory",
    ) -> None:
        self.capacity, self.max_waiting, self.unit = capacity, max_waiting, unit
        self.shared, self._of = shared, of
        self.max_waiting_tokens = max_waiting_tokens
        self.reserved = 0
        self._held: Counter[str] = Counter()
        self._queue: deque[Ticket] = deque()
        self._pool: Pool | None = None
        self._size = 0

    def join(self, pool: Pool, size: int, most: int) -> None:
        """Before the first request: hold at most ``most`` units, as many as ``pool`` has, with ``size`` bytes each."""
        self._pool, self._size, self.capacity = pool, size, most
        pool.join(self)

    @property
    def most(self) -> int:
        """The largest size that one request can have; a shared budget always leaves room for another tenant."""
        return largest(self.capacity, self.unit, shared=self.shared)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.unit) * self.unit

    def check(self, tokens: int) -> None:
        """Raises:
        TooLarge: when ``tokens`` can never fit.
        """
        if self.rounded(tokens) > self.most:
            raise TooLarge(tokens, self.most)

    def check_room(self, sizes: Sequence[int]) -> None:
        """Raises:
        QueueFull: when a request with sequences of these ``sizes`` would neither run now nor find a place.
        """
        tenant = context.current().tenant
        queue = [ticket for ticket in self._queue if not self.shared or ticket.tenant == tenant]
        if not queue:
            return
        parties = len({ticket.party for ticket in queue})
        if parties >= self.max_waiting:
            raise QueueFull(f"{parties} requests are waiting for {self._of}")
        tokens = sum(ticket.needed for ticket in queue)
        if self.max_waiting_tokens is not None and tokens + self._bounded(sizes) > self.max_waiting_tokens:
            raise QueueFull(f"{tokens} tokens are waiting for {self._of}")

    def _bounded(self, sizes: Sequence[int]) -> int:
        return sum(min(self.rounded(size), self.most) for size in sizes)

    def enter(self, sizes: Sequence[int]) -> list[Ticket]:
        """Tickets for the sequences of one request of the current tenant, all or none. A size is an upper bound:
        beyond the most that fits it counts as that.

        Raises:
            QueueFull: when there is no room and no place to wait.
        """
        self.check_room(sizes)
        party, tenant = object(), context.current().tenant
        tickets = [Ticket(self, party, tenant, self._bounded([size])) for size in sizes]
        self._queue.extend(tickets)
        self.grant()
        return tickets

    def resize(self, ticket: Ticket, tokens: int) -> None:
        self.check(tokens)
        needed = self.rounded(tokens)
        if ticket.granted.is_set():
            self._reserve(ticket, -ticket.needed)
            if self._fits(ticket, needed):
                self._reserve(ticket, needed)
            else:
                ticket.granted.clear()
                self._queue.appendleft(ticket)
        ticket.needed = needed
        self._settle()

    def leave(self, ticket: Ticket) -> None:
        if ticket.granted.is_set():
            self._reserve(ticket, -ticket.needed)
        else:
            self._queue.remove(ticket)
        self._settle()

    def _settle(self) -> None:
        """Grant what fits now, here and in the budgets of the same pool."""
        self.grant()
        if self._pool is not None:
            self._pool.settle()

    def _fits(self, ticket: Ticket, needed: int) -> bool:
        if self.reserved + needed > self.capacity:
            return False
        return self._pool is None or self._pool.has_room(self, needed * self._size, ticket.arrived)

    def _reserve(self, ticket: Ticket, tokens: int) -> None:
        self.reserved += tokens
        if self._pool is not None:
            self._pool.reserved += tokens * self._size
        self._held[ticket.tenant] += tokens
        if not self._held[ticket.tenant]:
            del self._held[ticket.tenant]

    def grant(self) -> bool:
        """Grant in the order of arrival; true if any was.

        A ticket beyond its tenant's share waits for that tenant's own work, and its later ones behind it. One that is
        next but does not fit is overtaken by others' tickets, up to its own size.
        """
        blocked: Ticket | None = None
        behind: set[str] = set()
        waiting: deque[Ticket] = deque()
        before = len(self._queue)
        for ticket in self._queue:
            if ticket.tenant not in behind and self._in_share(ticket):
                fits = self._fits(ticket, ticket.needed)
                if fits and (blocked is None or blocked.overtaken + ticket.needed <= blocked.needed):
                    if blocked is not None:
                        blocked.overtaken += ticket.needed
                    self._reserve(ticket, ticket.needed)
                    ticket.granted.set()
                    continue
                blocked = blocked or ticket
            behind.add(ticket.tenant)
            waiting.append(ticket)
        self._queue = waiting
        if self._pool is not None:
            # One that its own budget has no room for keeps nobody out of the pool.
            waits = blocked is not None and self.reserved + blocked.needed <= self.capacity
            self._pool.waits(self, blocked.arrived if waits and blocked is not None else None)
        return len(waiting) < before

    def _in_share(self, ticket: Ticket) -> bool:
        held = self._held[ticket.tenant]
        return not self.shared or in_share(held, ticket.needed, self.reserved, self.capacity)
