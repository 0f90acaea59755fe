"""The next tenant for the generation thread.

Each tenant has a counter of the seconds it has used, and the least one is served: Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024, arXiv:2401.00588), with measured time in place of weighted tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

CREDIT_S = 0.1
"""Seconds that a new tenant is ahead of the others: a short request ends before their next long steps."""

SLACK_S = 0.02
"""Counters this close are level, so that requests of several tenants share steps."""


class Turns:
    """Counters of the generation thread's time by tenant. Used on that thread only."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._active: set[str] = set()
        self._now = 0.0
        """The least counter of those that had work last; it never falls."""

    def enter(self, active: Iterable[str]) -> None:
        """Note the tenants with work. A new or returning one starts ``CREDIT_S`` below the least counter of the
        tenants that had work before. If its old counter is higher, it starts there. Idling earns no more, and having
        been alone is no debt."""
        tenants = set(active)
        served = self._active & tenants or self._active
        self._now = max(self._now, min((self._used[tenant] for tenant in served), default=0.0))
        start = self._now - CREDIT_S
        debts = {tenant: used for tenant, used in self._used.items() if used > start}
        self._used = debts | {tenant: max(self._used.get(tenant, start), start) for tenant in tenants}
        self._active = tenants

    def least(self, tenants: Collection[str]) -> str | None:
        """The tenant that has used the least time; None without tenants."""
        return min(tenants, key=lambda tenant: (self._used.get(tenant, 0.0), tenant), default=None)

    def level(self, tenants: Collection[str]) -> set[str]:
        """Those that have used at most ``SLACK_S`` more than the least."""
        most = min((self._used.get(tenant, 0.0) for tenant in tenants), default=0.0) + SLACK_S
        return {tenant for tenant in tenants if self._used.get(tenant, 0.0) <= most}

    def charge(self, seconds: float, tokens: Iterable[tuple[str, int]]) -> None:
        """Divide the time of a step between (tenant, tokens of the step)."""
        parts = list(tokens)
        total = sum(count for _, count in parts)
        for tenant, count in parts:
            self._used[tenant] = self._used.get(tenant, 0.0) + seconds * count / max(total, 1)
