"""Blocks one after another for each request, so that attention reads its keys where they are, as one piece.

transformers has the pages of all layers beside each other in a block, and gives out any free block. A request whose
blocks are not in a row still works: its keys are copied for each step.
"""

from __future__ import annotations

from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees
from typing_extensions import override

from service.engine.adapter.compatibility import adopt


class Runs(RegularTrees):
    """Free blocks of the cache. ``reserved`` has the blocks that each request is going to take."""

    reserved: dict[str, range]

    def take(self, request_id: str, blocks: int, table: list[int], most: int) -> list[int]:
        """``blocks`` free blocks behind the last of ``table``, which will have ``most`` of them in the end."""
        rest = max(most - len(table), blocks)
        run = self.reserved.pop(request_id, range(0))
        if len(run) < blocks or any(not self._is_free(block) for block in run[:blocks]):
            run = self._run(rest, table) or self._run(blocks, table)
        if not run:
            return self.pop_leaves(blocks)
        for block in run[:blocks]:
            self._remove(block)
        self.reserved[request_id] = run[blocks:]
        return list(run[:blocks])

    @override
    def delete_full_trees(self) -> list[int]:
        """Nothing: no other allocator wants the memory, and for a moment the cache would look full."""
        return []

    def _run(self, length: int, table: list[int]) -> range:
        """Free blocks in a row that no request reserves, if possible behind ``table``; empty without any."""
        blocks = [block for tree in self.trees.values() for block in tree]
        free = bytearray(max(blocks, default=0) + 1)
        for block in blocks:
            free[block] = 1
        for run in self.reserved.values():
            free[run.start : run.stop] = bytes(len(free[run.start : run.stop]))
        wanted = bytes([1]) * length
        if table and free.startswith(wanted, table[-1] + 1):
            return range(table[-1] + 1, table[-1] + 1 + length)
        first = free.find(wanted)
        return range(0) if first < 0 else range(first, first + length)

    def _is_free(self, block: int) -> bool:
        return block in self.trees.get(block // self.elems_per_tree, ())

    def _remove(self, block: int) -> None:
        root = block // self.elems_per_tree
        self.trees[root].remove(block)
        self._length -= 1
        if not self.trees[root]:
            del self.trees[root]


def give_out_runs(allocator: FullAttentionCacheAllocator) -> None:
    """Give each layer a part of the cache, in which its pages follow one another, and each request ``Runs`` of them.

    For an allocator that has the cache alone, before the first request.
    """
    pool = allocator.pool
    adopt(pool._free_blocks[allocator.index], Runs, reserved={})
    while pool.free_sectors:
        pool.allocate_sector(allocator.index)
    _, _, heads, width = allocator.cache_tensor.shape
    layers, page = len(allocator.layer_indices), allocator.tokens_per_page
    parts = allocator.cache_tensor.view(2 * layers, -1, heads, width)
    pages = parts.unflatten(1, (-1, page))
    for number, layer in enumerate(allocator.layer_indices):
        allocator._kv_token_views[layer] = parts[2 * number], parts[2 * number + 1]
        allocator._kv_page_views[layer] = pages[2 * number], pages[2 * number + 1]
    allocator.block_physical_stride = page
    allocator.write_trash_index = page * allocator.blocks_per_sector
    del allocator._copy_view  # blocks are no rows any more: what copies them, which we never ask for, must fail
