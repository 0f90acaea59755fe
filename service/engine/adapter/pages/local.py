"""Pages of the layers that attend locally: those that no later query reaches go back, whatever the encoding.

Prefixes are shared all the same: a prefix needs the pages of its last window only.
"""

from __future__ import annotations

import sys

from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from typing_extensions import override

from service.engine.adapter.pages.sectors import SectorAllocator
from service.engine.window import LocalWindow, SinkWindow


class LocalAllocator(SectorAllocator):
    """Keeps the pages that the next query of a request reaches through ``local``, and those behind them."""

    layer_type = SLIDING_ATTENTION
    local: LocalWindow
    step_tokens: int
    """The most new tokens of a request in a step."""

    @property
    def most_pages(self) -> int:
        return self.local.max_cached_len(sys.maxsize, self.step_tokens) // self.tokens_per_page

    @override
    def unread(self, position: int) -> int:
        return self.local.evicted_pages(position)

    @override
    def window_of(self, request_id: str) -> SinkWindow | LocalWindow | None:
        return self.local

    @override
    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return self.keys_of("", past_length, query_length)

    @override
    def keys_of(self, request_id: str, past_length: int, query_length: int) -> int:
        return query_length + self.local.tokens_read(past_length)
