"""Keys that a sequence reads turned, from step to step: each turns once, into a ring of spare places.

A band that moves positions near a query has a window of keys. With the query turned for the band, a key's own turn
depends on its position alone. So a step turns its new key, and the ring has those before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from patches.attention.decode.tables import Table, rotations
from patches.encoding.bands import Band
from patches.encoding.recipe import ResolvedRecipe

LEAST_SIZE = 64
"""Places of the smallest ring. One that becomes too small is made anew, twice as large."""


class Turning(NamedTuple):
    """Keys at ``positions``, which were written under the base of ``resolved``, turn as its ``band`` reads them."""

    band: Band
    resolved: ResolvedRecipe
    positions: range

    def table(self, positions: range) -> Table:
        """The rotation of keys at some of the positions."""
        return rotations(self.band.key_map, self.resolved, positions)


@dataclass
class Ring:
    """``size`` places from ``first`` on. The key of a position is at its remainder by the size.

    It has the keys of the positions ``known``, turned under ``resolved``.
    """

    first: int
    size: int
    resolved: ResolvedRecipe
    known: range = range(0)

    def fits(self, turning: Turning, room: int) -> bool:
        return self.resolved == turning.resolved and len(turning.positions) + room <= self.size

    def missing(self, positions: range) -> range:
        """Those of ``positions`` whose keys must turn. The last of them is new, also where a step is repeated."""
        has_rest = self.known.start <= positions.start < self.known.stop
        return range(min(self.known.stop, positions.stop - 1) if has_rest else positions.start, positions.stop)

    def written(self, positions: range) -> range:
        """``missing`` ones, and in a new ring all that it has places for.

        Another sequence may have left numbers there that are none. The places of later keys are read before those keys.
        """
        missing = self.missing(positions)
        return missing if self.known else range(missing.start, missing.start + self.size)

    def add(self, positions: range) -> None:
        """Have the keys of ``positions``: those that were missing have turned."""
        missing = self.missing(positions)
        first = positions.start if missing == positions else self.known.start
        self.known = range(max(first, positions.stop - self.size), positions.stop)

    def places(self, positions: range) -> np.ndarray:
        """The place int64 [n] of each of ``positions``."""
        return self.first + np.arange(positions.start, positions.stop) % self.size


class Rings:
    """The rings of all sequences of one cache, in ``places`` that no sequence has. Layers of one kind share them."""

    def __init__(self, places: range) -> None:
        self._places = places
        self._rings: dict[tuple[Hashable, Band], Ring] = {}

    @property
    def free(self) -> range:
        """The places behind those of all rings."""
        stops = (ring.first + ring.size for ring in self._rings.values())
        return range(max(stops, default=self._places.start), self._places.stop)

    def keep(self, names: Iterable[Hashable]) -> None:
        """Forget the rings of sequences that are not among ``names``."""
        kept = set(names)
        if any(name not in kept for name, _ in self._rings):
            self._rings = {key: ring for key, ring in self._rings.items() if key[0] in kept}

    def ring(self, name: Hashable, turning: Turning, room: int) -> Ring | None:
        """The ring of a sequence for a band, if enough places are free.

        It has room for the keys of ``turning``, and as many more.
        """
        ring = self._rings.get((name, turning.band))
        if ring is not None and ring.fits(turning, room):
            return ring
        self._rings.pop((name, turning.band), None)
        size = max(LEAST_SIZE, 1 << (len(turning.positions) + room - 1).bit_length())
        first = self._room(size)
        if first is None:
            return None
        ring = self._rings[name, turning.band] = Ring(first, size, turning.resolved)
        return ring

    def _room(self, size: int) -> int | None:
        """The first of ``size`` free places."""
        first = self._places.start
        for ring in sorted(self._rings.values(), key=lambda ring: ring.first):
            if ring.first - first >= size:
                break
            first = ring.first + ring.size
        return first if self._places.stop - first >= size else None
