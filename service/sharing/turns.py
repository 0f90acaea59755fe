"""Whose work the generation thread does next.

Each tenant has a counter of the seconds it has used, and the least one is served: Sheng et al., "Fairness in Serving
Large Language Models" (OSDI 2024, arXiv:2401.00588), with measured time in place of weighted tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Turns:
    """Counters of the generation thread's time by tenant. Used on that thread only."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def enter(self, active: Iterable[str]) -> None:
        """Note who has work. A tenant that was idle starts at the least counter: idling earns nothing."""
        tenants = set(active)
        least = min((self._used[tenant] for tenant in tenants if tenant in self._used), default=0.0)
        debts = {tenant: used for tenant, used in self._used.items() if used > least}
        self._used = debts | {tenant: max(self._used.get(tenant, least), least) for tenant in tenants}

    def least(self, tenants: Collection[str]) -> str | None:
        """The tenant that has used the least time; None without tenants."""
        return min(tenants, key=lambda tenant: (self._used.get(tenant, 0.0), tenant), default=None)

    def charge(self, seconds: float, tokens: Iterable[tuple[str, int]]) -> None:
        """Divide the time of a step between (tenant, tokens of the step)."""
        parts = list(tokens)
        total = sum(count for _, count in parts)
        for tenant, count in parts:
            self._used[tenant] = self._used.get(tenant, 0.0) + seconds * count / max(total, 1)
