"""Pages of the cache for encodings that reach the first and the last keys only."""

from __future__ import annotations

from collections.abc import Iterator

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, FullAttentionCacheAllocator

from service.engine.request import EngineRequest
from service.engine.window import Window


def allocator_of(cache: PagedAttentionCache) -> WindowedAllocator | None:
    """The allocator of the layers that attend to everything, if the model has such layers."""
    return cache.cache_allocators.get(FULL_ATTENTION)  # type: ignore[return-value]


class WindowedAllocator(FullAttentionCacheAllocator):
    """Gives back pages from the middle of a request's cache: those that no later query reaches.

    A block table then holds the pages of the first tokens, and behind them those of the last. To the base class
    the sequence is ``dropped`` pages shorter, everything behind the first tokens standing that much earlier.
    """

    requests: dict[str, EngineRequest]
    windows: dict[str, Window]
    dropped: dict[str, int]
    turns: Iterator[str]

    def window_of(self, request_id: str) -> Window | None:
        """What the request keeps, or None for everything. Remembered until its blocks are free: it may be
        cancelled in the middle of a step."""
        request = self.requests.get(request_id)
        if request_id not in self.windows and request is not None and request.kept is not None:
            self.windows[request_id] = Window(*request.kept, self.tokens_per_page)
        return self.windows.get(request_id)

    def drop(self, request_id: str, position: int) -> None:
        """Give back what no query from ``position`` on reaches. Blocks that were hashed stay for prefix sharing."""
        window = self.window_of(request_id)
        if window is None:
            return
        dropped, table = window.dropped(position), self.block_table.get(request_id, [])
        gap = slice(window.head_pages, window.head_pages + dropped - self.dropped.get(request_id, 0))
        self.pool.free_blocks(self.index, [block for block in table[gap] if self.ledger.release(block)])
        del table[gap]
        self.dropped[request_id] = dropped

    def _place(self, request_id: str, position: int) -> int:
        return position - self.dropped.get(request_id, 0) * self.tokens_per_page

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, self._place(request_id, past_length), query_length)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, self._place(request_id, past_length), query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_write_indices(request_id, self._place(request_id, past_length), query_length)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        indices = super().get_read_indices(request_id, self._place(request_id, past_length), query_length)
        if self.dropped.get(request_id):
            window = self.windows[request_id]
            del indices[window.first : window.head_pages * self.tokens_per_page]  # their page stays, they are not read
        return indices

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Asked for once per request of a batch, in its order and without its name: ``turns`` has the names."""
        window = self.windows.get(next(self.turns, ""))
        return query_length + (past_length if window is None else window.tokens_read(past_length))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.windows.pop(request_id, None)
        self.dropped.pop(request_id, None)
