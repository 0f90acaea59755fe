"""Blocks one after another for each request, so that attention reads its keys where they are, as one piece.

transformers has the pages of all layers beside each other in a block, and gives out any free block. A request whose
blocks are not in a row still works. Sums read its keys in several pieces, other calls copy them for each step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees
from typing_extensions import override

NEIGHBOURS = 16
"""Rows of a neighbourhood."""

SHORT = 16
"""Blocks of a row that is short: those of 9 to 16 blocks, say, all begin at multiples of 16."""


class Runs(RegularTrees):
    """Free blocks of the cache. ``reserved`` has the blocks that each request is going to take. Rows of about one
    length come from the rest of their one of ``neighbourhoods``, so that one call reads several.

    ``ledger`` knows the blocks kept for their prefixes. ``clear`` sets the keys and values of blocks to zero. One call
    reads requests of different lengths, so requests get clear blocks, and have ``ahead`` more behind them. Masked keys
    must be finite, and an earlier request may have left something else.
    """

    reserved: dict[str, range]
    neighbourhoods: dict[int, range]
    ahead: int
    ledger: BlockLedger
    clear: Callable[[range], object]

    def take(self, request_id: str, blocks: int, table: list[int], most: int) -> list[int]:
        """``blocks`` free blocks behind the last of ``table``, which will have ``most`` of them in the end."""
        rest = max(most - len(table), blocks)
        run = self.reserved.pop(request_id, range(0))
        if len(run) >= blocks:
            self.clear(run[self.ahead : self.ahead + blocks])
        else:
            run = self._behind(table, blocks, rest) if table else self._row(rest) or self._row(blocks)
            self.clear(run[: blocks + self.ahead])
        if not run:
            taken = self.pop_leaves(blocks)
            for block in taken:
                self.clear(range(block, block + 1))
            return taken
        for block in run[:blocks]:
            self._remove(block)
        self.reserved[request_id] = run[blocks:]
        return list(run[:blocks])

    def end(self, request_id: str, table: list[int]) -> int:
        """The block behind those of ``table`` and the clear ones that the request reserves right behind them."""
        run, behind = self.reserved.get(request_id, range(0)), table[-1] + 1
        return run[: self.ahead].stop if run and run.start == behind else behind

    @override
    def pop_leaves(self, num_leaves: int) -> list[int]:
        """Any free blocks. Requests lose what they had reserved of these."""
        taken = super().pop_leaves(num_leaves)
        lost = set(taken)
        self.reserved = {name: run for name, run in self.reserved.items() if lost.isdisjoint(run)}
        return taken

    @override
    def delete_full_trees(self) -> list[int]:
        """Nothing: no other allocator wants the memory, and for a moment the cache would look full."""
        return []

    def _unreserved(self) -> bytearray:
        """A one for each free block that no request reserves."""
        blocks = [block for tree in self.trees.values() for block in tree]
        free = bytearray(max((*blocks, *self.ledger.cached_blocks), default=0) + 1)
        for block in blocks:
            free[block] = 1
        for run in self.reserved.values():
            free[run.start : run.stop] = bytes(len(free[run.start : run.stop]))
        return free

    def _behind(self, table: list[int], least: int, most: int) -> range:
        """Blocks right behind ``table``. Elsewhere its keys are in no row any more, so ``least`` blocks will do."""
        free, first = self._unreserved(), table[-1] + 1
        stop = free.find(b"\0", first, first + most)
        run = range(first, min(len(free), first + most) if stop < 0 else stop)
        if len(run) >= least:
            return run
        first = free.find(bytes([1]) * least)
        return range(0) if first < 0 else range(first, first + least)

    def _row(self, length: int) -> range:
        """Blocks in a row that no request has or reserves; empty without any.

        The first choice is the next row of its neighbourhood, the second a new one, the third any row. In each, blocks
        that are kept for their prefixes may give way: the longest unused first. A row is a little longer if the blocks
        behind it are free, or kept where its own were. One call reads as many keys of each of its sequences.
        """
        free, kept = self._unreserved(), list(self.ledger.cached_blocks)
        even = -(-length // self.ahead) * self.ahead
        distance, with_kept = _distance(even), _with(free, kept)
        starts = _starts(free, length, distance)
        found = self._next(_with(free, kept[: len(kept) // 2]), length, even)
        if found is None:
            found = self._near(free, starts, even)
        if found is None:
            last_use = {block: number for number, block in enumerate(kept)}
            others = _starts(with_kept, length, distance)
            others.sort(key=lambda start: max(last_use.get(start + n, -1) for n in range(length)))
            found = self._near(with_kept, others, even)
            if found is None:
                if not others:
                    return range(0)
                found = (starts or others)[0]
        own = range(found, found + length)
        behind = bytes((free if all(free[own.start : own.stop]) else with_kept)[own.stop : found + even])
        run = range(found, own.stop + len(behind) - len(behind.lstrip(b"\1")))
        self._evict([block for block in run if not free[block]])
        return run

    def _next(self, free: bytearray, length: int, even: int) -> int | None:
        """The next row of about this length in its neighbourhood, or right behind: then it has become longer."""
        kind, distance, wanted = even // self.ahead, _distance(even), bytes([1]) * length
        rest = self.neighbourhoods.get(kind)
        if rest is None:
            return None
        unclaimed = self._unclaimed(free, kind)
        found = next((start for start in [*rest[::distance], rest.stop] if unclaimed.startswith(wanted, start)), None)
        if found is not None:
            self.neighbourhoods.pop(kind)
            self.neighbourhoods[kind] = range(found + distance, max(rest.stop, found + distance))
        return found

    def _near(self, free: bytearray, starts: list[int], length: int) -> int | None:
        """The first of ``starts`` with room for a neighbourhood of rows of about this ``length``.

        A neighbourhood is given out once, from its beginning, and grows at its end. So prefixes that are kept there do
        not give way to the next requests, while older ones stay elsewhere.
        """
        kind, distance = length // self.ahead, _distance(length)
        unclaimed, width = self._unclaimed(free, kind), NEIGHBOURS * distance
        found = next((start for start in starts if unclaimed.startswith(bytes([1]) * width, start)), None)
        if found is None:
            return None
        self.neighbourhoods.pop(kind, None)
        self.neighbourhoods[kind] = range(found + distance, found + width)
        while 2 * sum(map(len, self.neighbourhoods.values())) > len(free):  # lengths that come no more claim nothing
            del self.neighbourhoods[next(iter(self.neighbourhoods))]
        return found

    def _unclaimed(self, free: bytearray, kind: int) -> bytearray:
        """``free`` without the neighbourhoods of other kinds."""
        unclaimed = free.copy()
        for other, blocks in self.neighbourhoods.items():
            if other != kind:
                unclaimed[blocks.start : blocks.stop] = bytes(len(blocks))
        return unclaimed

    def _evict(self, blocks: list[int]) -> None:
        forget(self.ledger, blocks)
        self.add_leaves(blocks)

    def _remove(self, block: int) -> None:
        root = block // self.elems_per_tree
        self.trees[root].remove(block)
        self._length -= 1
        if not self.trees[root]:
            del self.trees[root]


def blocks_in_runs(blocks: list[int], page: int) -> list[range]:
    """The places of ``blocks`` of ``page`` places each, in as few runs as possible."""
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):  # most are one
        return [range(blocks[0] * page, (blocks[-1] + 1) * page)]
    parts = np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)
    return [range(int(part[0]) * page, (int(part[-1]) + 1) * page) for part in parts]


def forget(ledger: BlockLedger, blocks: list[int]) -> None:
    """``blocks`` are kept for their prefixes no more."""
    for block in blocks:
        del ledger.cached_blocks[block]
        del ledger.hash_to_block[ledger.block_to_hash.pop(block)]


def _with(free: bytearray, blocks: list[int]) -> bytearray:
    """A copy of ``free`` with a one for each of ``blocks``."""
    found = free.copy()
    for block in blocks:
        found[block] = 1
    return found


def _starts(free: bytearray, length: int, distance: int) -> list[int]:
    """First blocks of rows of ``length`` ones: those at multiples of ``distance``, or else the first row of all.

    So requests are equally far apart, and one call reads the keys of several.
    """
    wanted = bytes([1]) * length
    even = [start for start in range(0, len(free), distance) if free.startswith(wanted, start)]
    first = free.find(wanted)
    return even or ([] if first < 0 else [first])


def _distance(length: int) -> int:
    """Blocks between the beginnings of rows: a power of two for short ones, an eighth more at most for others."""
    power = 1 << (length - 1).bit_length()
    unit = power if power <= SHORT else power // SHORT
    return -(-length // unit) * unit
