"""Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv:1608.01350).

A key belongs to the first replica clockwise on a ring. The exception is a replica with clearly more to do than the
mean. The rule has no state beside the loads, so every proxy decides alike and a restart loses nothing.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b

POINTS = 64
"""Points of each replica on the ring: shares of keys differ by about an eighth."""

SPARE = 2
"""Requests that any replica may have beyond the bound, which means little at small loads."""


class Ring:
    """The order of replicas for each key. Replicas that come or go move only their own keys."""

    def __init__(self, names: Collection[str]) -> None:
        points = sorted((_hash(f"{name} {number}"), name) for name in names for number in range(POINTS))
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]

    def order(self, key: str) -> Iterator[str]:
        """Every replica once, clockwise from ``key``."""
        start = bisect.bisect_right(self._hashes, _hash(key))
        seen = set()
        for step in range(len(self._names)):
            name = self._names[(start + step) % len(self._names)]
            if name not in seen:
                seen.add(name)
                yield name

    def choose(self, key: str, loads: Mapping[str, int], slack: float) -> list[str]:
        """Replicas to try, best first. They are the first on the ring within ``slack`` times the mean load, then the
        two with the least load. Only replicas in ``loads`` take part."""
        most = slack * sum(loads.values()) / len(loads) + SPARE
        least = heapq.nsmallest(2, loads, key=loads.__getitem__)
        first = next((name for name in self.order(key) if loads.get(name, most + 1) <= most), least[0])
        return list(dict.fromkeys((first, *least)))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
