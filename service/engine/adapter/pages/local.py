"""Pages of the layers that attend locally: those that no later query reaches go back, whatever the encoding.

Prefixes are shared all the same: a prefix needs the pages of its last window only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
from typing_extensions import override

from service.engine.adapter.pages.sectors import SectorAllocator
from service.engine.window import LocalWindow, SinkWindow


def chained(tokens: Sequence[int], page_size: int) -> Iterator[int]:
    """Hashes of the whole pages of ``tokens``; each covers all tokens before it too."""
    known = None
    for start in range(0, len(tokens) - page_size + 1, page_size):
        known = compute_block_hash(known, list(tokens[start : start + page_size]))
        yield known


class LocalAllocator(SectorAllocator):
    """Keeps the pages that the next query of a request reaches through ``local``, and those behind them."""

    layer_type = SLIDING_ATTENTION
    local: LocalWindow
    step_tokens: int
    """The most new tokens of a request in a step."""
    chains: dict[str, list[int]]
    """Request id -> hashes of its pages, from its first one on, those that went back included."""

    @property
    def most_pages(self) -> int:
        return self.local.max_cached_len(sys.maxsize, self.step_tokens) // self.tokens_per_page

    @override
    def window_of(self, request_id: str) -> SinkWindow | LocalWindow | None:
        return self.local

    @override
    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return self.keys_of("", past_length, query_length)

    @override
    def keys_of(self, request_id: str, past_length: int, query_length: int) -> int:
        return query_length + self.local.tokens_read(past_length)

    @override
    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Keep the hashes of ``new_new_blocks`` more pages. A page equal to a known one becomes that one."""
        chain, page = self.chains.setdefault(request_id, []), self.tokens_per_page
        table, evicted = self.block_table[request_id], self.evicted_pages.get(request_id, 0)
        for number in range(len(chain), len(chain) + new_new_blocks):
            known = chain[-1] if chain else None
            chain.append(compute_block_hash(known, token_ids[number * page : (number + 1) * page]))
            row = number - evicted
            if row >= 0:
                self._keep(table, row, chain[-1])

    def _keep(self, table: list[int], row: int, known: int) -> None:
        block, equal = table[row], self.ledger.register_new_hash(table[row], known)
        if equal is not None:
            self.ledger.acquire(equal)
            table[row] = equal
            if self.ledger.release(block):
                self.pool.free_blocks(self.index, [block])

    def matched(self, hashes: Sequence[int]) -> int:
        """The most of the pages with ``hashes`` behind which a query finds all that it reaches."""
        found, missing = 0, -1
        for count, known in enumerate(hashes, 1):
            if known not in self.ledger.hash_to_block:
                missing = count - 1
            if missing < self.local.evicted_pages(count * self.tokens_per_page):
                found = count
        return found

    def acquire(self, request_id: str, hashes: Sequence[int]) -> None:
        """Give a new request the pages with ``hashes`` that it reaches behind them."""
        evicted = self.local.evicted_pages(len(hashes) * self.tokens_per_page)
        blocks = [self.ledger.hash_to_block[known] for known in hashes[evicted:]]
        self.acquire_prefix_blocks(request_id, len(blocks) * self.tokens_per_page, blocks)
        self.evicted_pages[request_id], self.chains[request_id] = evicted, list(hashes)

    @override
    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.chains.pop(request_id, None)
