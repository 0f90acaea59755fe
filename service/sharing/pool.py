"""Memory that the budgets of several models share: each counts in tokens, and a token has so many bytes.

First come, first served: a ticket that waits for the memory keeps younger ones of other budgets out of it. So a stream
of small requests to one model does not starve a large one to another.
"""

from __future__ import annotations

from typing import Protocol


class Budget(Protocol):
    """A part of a pool that grants its tickets in their order."""

    def grant(self) -> bool:
        """Grant what fits; true if anything did."""


class Pool:
    """``capacity`` bytes. Used from one event loop only."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._waits_since: dict[Budget, int | None] = {}
        """The arrival of each budget's oldest ticket that waits for room."""

    def join(self, budget: Budget) -> None:
        self._waits_since[budget] = None

    def has_room(self, budget: Budget, size: int, arrived: int) -> bool:
        """True if ``size`` bytes fit, or are alone, and no other budget has a ticket that waits for longer."""
        older = (since for other, since in self._waits_since.items() if other is not budget and since is not None)
        fits = self.reserved + size <= self.capacity or not self.reserved
        return fits and all(arrived < since for since in older)

    def waits(self, budget: Budget, since: int | None) -> None:
        self._waits_since[budget] = since

    def settle(self) -> None:
        """Grant what fits now, the budget with the oldest ticket first, until nothing changes."""
        found = True
        while found:
            waiting = [(since, budget) for budget, since in self._waits_since.items() if since is not None]
            found = any(budget.grant() for _, budget in sorted(waiting, key=lambda pair: pair[0]))
