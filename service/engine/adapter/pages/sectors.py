"""Memory of a cache whose layers need different keys: sectors, each of one request in one group of layers.

Layers that attend locally keep a window, all others keep every key. Groups take free sectors as they need them (Jenga,
arXiv:2503.18292). A sector of one request is empty when the request ends. So the memory that admission has counted is
always there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
from typing_extensions import override

from service.engine.adapter.pages.windowed import WindowedAllocator
from service.engine.window import Sectors

RESERVED = 2
"""Sectors that no request gets: transformers numbers its own from there on. Padding writes into the second."""


class SectorAllocator(WindowedAllocator):
    """Gives a request whole sectors, and has the blocks that are ``left`` in its last one for its next keys."""

    width: int
    """Pages of a sector, of one layer each."""
    left: dict[str, list[int]]

    @override
    def page_of(self, block: int) -> int:
        sector, number = divmod(block, self.blocks_per_sector)
        return self.rows_per_token * (sector * self.width + number * self.pages_per_block)

    @override
    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        needed = self.needs_new_blocks(request_id, past_length, query_length) - len(self.left.get(request_id, ()))
        return max(0, -(-needed // self.blocks_per_sector))

    @override
    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """From the sectors that ``needs_new_sectors`` has asked for: nobody has taken others since."""
        needed = self.needs_new_blocks(request_id, past_length, query_length)
        table, left = self.block_table.setdefault(request_id, []), self.left.setdefault(request_id, [])
        free = self.pool._free_blocks[self.index]
        while len(left) < needed:
            _, blocks = free.trees.popitem()
            free._length -= len(blocks)
            left.extend(reversed(blocks))
        table.extend(left[:needed])
        del left[:needed]

    @override
    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.pool.free_blocks(self.index, self.left.pop(request_id, []))


def divide(cache: PagedAttentionCache, sectors: Sectors, tokens: int) -> None:
    """Give the layers of ``cache`` their pages in other memory, for ``tokens`` in every layer.

    Before the first request, of a cache whose allocators are as transformers made them.
    """
    allocators: list[Any] = list(cache.cache_allocators.values())
    count = sectors.count(tokens)
    first = allocators[0]
    shape = first.tokens_per_page, first.num_key_value_heads, first.head_dim
    for each in allocators:  # without the last view, their memory is free
        del each._copy_view, each._kv_token_views, each._kv_page_views, each.cache_tensor
    cache.cache_tensor = torch.empty(0)
    pages = torch.zeros(2 * (RESERVED + count) * sectors.width, *shape, dtype=first.cache_dtype, device=cache.device)
    cache.pool = CachePool(count, len(allocators), RESERVED)
    cache.num_sectors, cache.bytes_per_sector = count, sectors.width * first.bytes_per_page
    cache.num_blocks = tokens // first.tokens_per_page
    for each in allocators:
        each.pool, each.blocks_per_sector = cache.pool, sectors.width // each.pages_per_block
        cache.pool.set_blocks_per_sector(each.index, each.blocks_per_sector)
        each.num_blocks = count * each.blocks_per_sector
        each.write_trash_index = 2 * sectors.width * each.tokens_per_page
        each._kv_page_views = {
            layer: (pages[2 * number : -1], pages[2 * number + 1 :]) for number, layer in enumerate(each.layer_indices)
        }
    cache.max_tokens_read = max(each.num_blocks for each in allocators) * first.tokens_per_page
