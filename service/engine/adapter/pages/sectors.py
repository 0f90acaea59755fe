"""Memory of a cache whose layers need different keys: sectors, each of one request in one group of layers.

Layers that attend locally keep a window, all others keep every key. Groups take free sectors as they need them (Jenga,
arXiv:2503.18292). A sector has the pages of one request, or those of a prefix that several share. So it is empty once
they end, and the memory that admission has counted is always there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
from typing_extensions import override

from service.engine.adapter.pages.runs import forget
from service.engine.adapter.pages.windowed import WindowedAllocator
from service.engine.window import Sectors

RESERVED = 2
"""Sectors that no request gets: transformers numbers its own from there on. Padding writes into the second."""


def chained(tokens: Sequence[int], page_size: int) -> Iterator[int]:
    """Hashes of the whole pages of ``tokens``; each covers all tokens before it too."""
    known = None
    for start in range(0, len(tokens) - page_size + 1, page_size):
        known = compute_block_hash(known, list(tokens[start : start + page_size]))
        yield known


class SectorAllocator(WindowedAllocator):
    """Gives a request whole sectors, and has the blocks that are ``left`` in its last one for its next keys.

    Whole sectors of a prefix are shared: a part of one would keep the rest of it from all others.
    """

    width: int
    """Pages of a sector, of one layer each."""
    left: dict[str, list[int]]
    max_length: int | None
    """The most tokens of a request, None for as many as the cache holds."""
    chains: dict[str, list[int]]
    """Request id -> hashes of its pages, from its first one on, those that went back included."""

    @property
    def most_pages(self) -> int:
        longest = self.num_blocks * self.tokens_per_page
        return -(-min(self.max_length or longest, longest) // self.tokens_per_page)

    def unread(self, position: int) -> int:
        """First pages that a request at ``position`` does without, whatever its encoding."""
        return 0

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
    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        past = self._shifted(request_id, past_length)
        return self._places(request_id, past, past + query_length)

    @override
    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        indices = self._places(request_id, 0, self._shifted(request_id, past_length) + query_length)
        return self._without_rest(request_id, indices)

    def _places(self, request_id: str, start: int, stop: int) -> list[int]:
        """The places of the keys from ``start`` to ``stop`` of those that a request has cached."""
        places, page, table = list[int](), self.tokens_per_page, self.block_table[request_id]
        for row in range(start // page, -(-stop // page)):
            first, before = self.page_of(table[row]) * page, row * page
            places.extend(range(first + max(start - before, 0), first + min(stop - before, page)))
        return places

    @override
    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Keep the hashes of ``new_new_blocks`` more pages. A sector equal to a known one becomes that one."""
        chain, page, size = self.chains.setdefault(request_id, []), self.tokens_per_page, self.blocks_per_sector
        before, evicted = len(chain), self.evicted_pages.get(request_id, 0)
        for number in range(before, before + new_new_blocks):
            tokens = token_ids[number * page : (number + 1) * page]
            chain.append(compute_block_hash(chain[-1] if chain else None, tokens))
        if size > 1 and request_id in self.windows:
            return  # pages leave its sectors one by one
        for first in range(before // size * size, len(chain) - size + 1, size):
            if first >= evicted:
                self._keep(self.block_table[request_id], first - evicted, self._keys(chain[first : first + size]))

    def _keep(self, table: list[int], row: int, keys: Sequence[int]) -> None:
        """Have the blocks of one sector, from ``row`` of a ``table`` on, known by ``keys``."""
        known = [self.ledger.hash_to_block.get(each) for each in keys]
        blocks = table[row : row + len(keys)]
        found = [block for block in known if block is not None]
        if len(found) == len(keys):
            for block in found:
                self.ledger.acquire(block)
            table[row : row + len(keys)] = found
            self.pool.free_blocks(self.index, [block for block in blocks if self.ledger.release(block)])
            return
        self._forget(found)  # some pages of that sector gave way
        for block, each in zip(blocks, keys, strict=True):
            self.ledger.register_new_hash(block, each)

    def _forget(self, blocks: Sequence[int]) -> None:
        """Have ``blocks`` known no more. Those of no request are free then."""
        kept = [block for block in blocks if block in self.ledger.cached_blocks]
        forget(self.ledger, kept)
        self.pool.free_blocks(self.index, kept)
        for block in set(blocks).difference(kept):
            del self.ledger.hash_to_block[self.ledger.block_to_hash.pop(block)]

    def _keys(self, hashes: Sequence[int]) -> list[int]:
        """The keys of pages in whole sectors, which the last hash of a sector decides: texts may part within it."""
        size = self.blocks_per_sector
        if size == 1:
            return list(hashes)
        ends = hashes[size - 1 :: size]
        return [compute_block_hash(end, [number]) for end in ends for number in range(size)]

    def knows(self, hashes: Sequence[int]) -> bool:
        """True if the sector that ends with the last of ``hashes`` is known; also in the middle of one."""
        size = self.blocks_per_sector
        return len(hashes) % size > 0 or self._keys(hashes[-size:])[0] in self.ledger.hash_to_block

    def matched(self, hashes: Sequence[int], unit: int) -> int:
        """The most of the pages with ``hashes``, a multiple of ``unit``, behind which a query finds all it reaches."""
        found, missing = 0, -1
        for count, known in enumerate(self._keys(hashes), 1):
            if known not in self.ledger.hash_to_block:
                missing = count - 1
            if count % unit == 0 and missing < self.unread(count * self.tokens_per_page):
                found = count
        return found

    def acquire(self, request_id: str, hashes: Sequence[int]) -> None:
        """Give a new request the pages with ``hashes`` that it reaches behind them."""
        evicted = self.unread(len(hashes) * self.tokens_per_page)
        blocks = [self.ledger.hash_to_block[known] for known in self._keys(hashes)[evicted:]]
        self.acquire_prefix_blocks(request_id, len(blocks) * self.tokens_per_page, blocks)
        self.chains[request_id], self.evicted_pages[request_id] = list(hashes), evicted

    @override
    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.pool.free_blocks(self.index, self.left.pop(request_id, []))
        self.chains.pop(request_id, None)


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
        each._kv_token_views = {
            layer: (keys.flatten(0, 1), values.flatten(0, 1)) for layer, (keys, values) in each._kv_page_views.items()
        }
    cache.max_tokens_read = max(each.num_blocks for each in allocators) * first.tokens_per_page
