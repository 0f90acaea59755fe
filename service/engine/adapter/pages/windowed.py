"""Pages of the cache for encodings that reach the first and the last keys only (StreamingLLM, arXiv:2309.17453)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, FullAttentionCacheAllocator
from typing_extensions import override

from service.engine.adapter.compatibility import IncompatibleTransformers
from service.engine.adapter.pages.runs import Runs, blocks_in_runs
from service.engine.request import EngineRequest
from service.engine.window import LocalWindow, SinkWindow


def whole_of(cache: PagedAttentionCache) -> WindowedAllocator | None:
    """The allocator of the layers that attend to everything, if the model has such layers."""
    return cache.cache_allocators.get(FULL_ATTENTION)  # type: ignore[return-value]


class Turn(NamedTuple):
    """One request of a batch, as ``get_seqlen_k`` is asked about it."""

    request_id: str
    past_length: int
    query_length: int


class WindowedAllocator(FullAttentionCacheAllocator):
    """Gives back pages from the middle of a request's cache: those that no later query reaches.

    A block table then has the pages of the first tokens, and behind them those of the last. To the base class the
    sequence is ``evicted_pages`` shorter. To it, all that follows the first tokens moves forward by as many pages.
    """

    requests: dict[str, EngineRequest]
    windows: dict[str, SinkWindow]
    evicted_pages: dict[str, int]
    turns: Iterator[Turn]
    by_head: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Layer -> its keys and values [kv_heads, places, head_dim], if requests get blocks in a row."""
    spare: range
    """Places behind those of all blocks."""

    @property
    def most_pages(self) -> int:
        """The most pages of a request."""
        return self.num_blocks

    def page_of(self, block: int) -> int:
        """The page of a block, as layers number them."""
        return block * self.block_physical_stride // self.tokens_per_page

    def window_of(self, request_id: str) -> SinkWindow | LocalWindow | None:
        """The tokens that the request needs, or None for all. Remembered until its blocks are free: it may be
        cancelled in the middle of a step."""
        request = self.requests.get(request_id)
        if request_id not in self.windows and request is not None and request.sink_window is not None:
            self.windows[request_id] = SinkWindow(*request.sink_window, self.tokens_per_page)
        return self.windows.get(request_id)

    def evict(self, request_id: str, position: int) -> None:
        """Give back what no query from ``position`` on reaches. Blocks that were hashed stay for prefix sharing."""
        window = self.window_of(request_id)
        if window is None:
            return
        evicted, table = window.evicted_pages(position), self.block_table.get(request_id, [])
        gap = slice(window.sink_pages, window.sink_pages + evicted - self.evicted_pages.get(request_id, 0))
        self.pool.free_blocks(self.index, [block for block in table[gap] if self.ledger.release(block)])
        del table[gap]
        self.evicted_pages[request_id] = evicted

    @contextmanager
    def asked_in_turn(self, turns: Sequence[Turn]) -> Iterator[None]:
        """Within it, ``get_seqlen_k`` is asked about each of ``turns`` once and in this order.

        Raises:
            IncompatibleTransformers: when it is not.
        """
        self.turns = iter(turns)
        yield
        if next(self.turns, None) is not None:
            raise IncompatibleTransformers("get_seqlen_k is not called for every request of a batch")

    def _shifted(self, request_id: str, position: int) -> int:
        return position - self.evicted_pages.get(request_id, 0) * self.tokens_per_page

    def has_room(self, request_id: str, length: int) -> bool:
        """True if a request's blocks have room for ``length`` tokens of it. Most steps need to know no more."""
        table = self.block_table.get(request_id)
        return table is not None and self._shifted(request_id, length) <= len(table) * self.tokens_per_page

    @override
    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, self._shifted(request_id, past_length), query_length)

    @override
    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        past_length, free = self._shifted(request_id, past_length), self.runs
        if free is None:
            super().allocate_cache_to_request(request_id, past_length, query_length)
            return
        table, request = self.block_table.setdefault(request_id, []), self.requests.get(request_id)
        length = 0
        if request is not None and request.sink_window is None:  # keys behind a gap are copied, so a row is no use
            length = len(request.prompt_ids) + request.max_new_tokens
        needed = self._compute_blocks_needed(len(table), past_length, query_length)
        if needed:
            table.extend(free.take(request_id, needed, table, -(-length // self.tokens_per_page)))

    @property
    def runs(self) -> Runs | None:
        """The free blocks, if requests get theirs in a row."""
        free = self.pool._free_blocks[self.index]
        return free if isinstance(free, Runs) else None

    def places(self, request_ids: Sequence[str]) -> dict[str, list[range]]:
        """Request id -> runs of the places of its keys, the last with clear ones behind them."""
        page, found, free = self.tokens_per_page, dict[str, list[range]](), self.runs
        if free is None:
            return found
        for name in request_ids:
            table, sinks = self.block_table[name], list[range]()
            if self.evicted_pages.get(name):
                sinks, table = self._sinks(self.windows[name], table), table[self.windows[name].sink_pages :]
            runs = blocks_in_runs(table, page)
            runs[-1] = range(runs[-1].start, free.end(name, table) * page)
            found[name] = [*sinks, *runs]
        return found

    def _sinks(self, window: SinkWindow, table: list[int]) -> list[range]:
        """Runs of the places of the first tokens, without the rest of their last page."""
        if not window.sink_pages:
            return []
        runs = blocks_in_runs(table[: window.sink_pages], self.tokens_per_page)
        runs[-1] = range(runs[-1].start, runs[-1].stop - window.sink_pages * self.tokens_per_page + window.num_sinks)
        return runs

    @override
    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_write_indices(request_id, self._shifted(request_id, past_length), query_length)

    @override
    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        indices = super().get_read_indices(request_id, self._shifted(request_id, past_length), query_length)
        return self._without_rest(request_id, indices)

    def _without_rest(self, request_id: str, indices: list[int]) -> list[int]:
        """``indices`` of a request without the rest of its sinks' last page, if there is a gap behind it."""
        window = self.windows.get(request_id)
        if window is not None and self.evicted_pages.get(request_id):
            del indices[window.num_sinks : window.sink_pages * self.tokens_per_page]
        return indices

    @override
    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Called once per request of a batch, in its order and without its name: ``turns`` has the names."""
        turn = next(self.turns, None)
        if turn is None or (turn.past_length, turn.query_length) != (past_length, query_length):
            raise IncompatibleTransformers("get_seqlen_k is not called once per request of a batch, in its order")
        return self.keys_of(turn.request_id, past_length, query_length)

    def keys_of(self, request_id: str, past_length: int, query_length: int) -> int:
        """``get_seqlen_k`` of one request."""
        window = self.windows.get(request_id)
        return query_length + (past_length if window is None else window.tokens_read(past_length))

    @override
    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.block_table.get(request_id, []).reverse()  # of a prefix that is kept, the last blocks give way first
        super().free_blocks(request_id, no_cache)
        if self.runs is not None:
            self.runs.reserved.pop(request_id, None)
        self.windows.pop(request_id, None)
        self.evicted_pages.pop(request_id, None)
