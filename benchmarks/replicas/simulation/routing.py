"""Proxies that choose replicas, each with its own knowledge of their loads."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from service.scale.proxy.ring import Ring

Policy = Literal["affinity", "least_of_two", "random"]
"""``affinity`` is the project's ring with bounded loads, ``least_of_two`` Serve's own choice."""


class Proxy:
    """Chooses a replica for each request, from loads as Ray Serve's router knows them.

    The load of a replica arrives with each request that it accepts. In between, the proxy adds and subtracts its own
    requests only. It forgets loads older than ``forget_s``, and counts them as 0.
    """

    def __init__(self, policy: Policy, slack: float, forget_s: float, noise: random.Random) -> None:
        self._policy, self._slack, self._forget_s, self._noise = policy, slack, forget_s, noise
        self.loads: dict[str, int] = {}
        self._names: Sequence[str] = ()
        self._heard: dict[str, float] = {}
        self._order: deque[tuple[float, str]] = deque()
        self._ring = Ring(())

    def update(self, ring: Ring, names: Sequence[str]) -> None:
        """The replicas that run now."""
        self._ring = ring
        self.loads = {name: self.loads.get(name, 0) for name in names}
        self._names = names

    def choose(self, now: float, prefix: int, load_of: Callable[[str], int]) -> str:
        """Name of the replica for a request. ``load_of`` asks a replica: Serve's own router does so where it has
        forgotten a load."""
        self._forget(now)
        if self._policy == "affinity":
            return self._ring.choose(f"prefix {prefix}", self.loads, self._slack)[0]
        two = self._noise.sample(self._names, min(2, len(self._names)))
        if self._policy == "random":
            return two[0]
        return min(two, key=lambda name: self.loads[name] if name in self._heard else load_of(name))

    def age(self, now: float, name: str) -> float | None:
        """Seconds since the proxy has heard from a replica; None where it has forgotten."""
        return now - self._heard[name] if name in self._heard else None

    def hear(self, now: float, name: str, load: int) -> None:
        """A replica has accepted a request, and has so many."""
        self.loads[name] = load
        self._heard[name] = now
        self._order.append((now, name))

    def ended(self, now: float, name: str) -> None:
        """A request of this proxy has ended."""
        if self.loads.get(name, 0) > 0 and name in self._heard:
            self.loads[name] -= 1
            self.hear(now, name, self.loads[name])

    def _forget(self, now: float) -> None:
        while self._order and self._order[0][0] < now - self._forget_s:
            at, name = self._order.popleft()
            if self._heard.get(name) == at:
                del self._heard[name]
                if name in self.loads:
                    self.loads[name] = 0
