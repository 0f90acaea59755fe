"""The paged cache: prefixes are shared within one encoding and one tenant only."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState
from typing_extensions import override

from patches import LayersInPlace
from service.engine.adapter.pages.local import LocalAllocator
from service.engine.adapter.pages.runs import forget
from service.engine.adapter.pages.salted import Salted, TokensOf
from service.engine.adapter.pages.sectors import chained
from service.engine.adapter.pages.windowed import WindowedAllocator, whole_of
from service.engine.request import EngineRequest
from service.engine.window import SinkWindow


class Table(NamedTuple):
    """``pages`` of a request as its layers number them: ``first`` of them, then a gap of ``evicted`` ones."""

    pages: tuple[int, ...]
    first: int
    evicted: int


class EncodingCache(PagedAttentionCache):
    """Prefix sharing keyed by tokens and by the request's cache key (tenant, salt, encoding).

    Keys made under one recipe are wrong under another, and one tenant must not learn the prompts of another. Blocks are
    found by a hash over int32 token ids. The bits above the vocabulary carry a number for the cache key, so blocks of
    different keys never match. When the numbers run out, those of keys without a live request are reused, and their
    blocks are evicted.
    """

    requests: dict[str, EngineRequest]
    numbers: dict[object, int]
    live_keys: dict[str, object]
    """Request id -> its cache key."""
    token_bits: int
    in_place: dict[str, list[range]]
    """Request id -> the runs of its places, from its first key on, in a step of single new tokens."""
    tables: dict[tuple[str, int], tuple[list[int], tuple[int, ...]]]
    """Request id and group of layers -> its blocks, and their pages as layers number them."""
    kept: LayersInPlace
    """The state of layers between steps."""
    page_size: int
    """Tokens per page."""
    allocators: list[WindowedAllocator]
    """The allocators of the groups of layers."""
    has_sectors: bool
    """True if some layers keep a window only, in sectors of the memory."""

    @property
    def groups(self) -> int:
        """Groups of layers, each with its own block tables."""
        return len(self.cache_allocators)

    @property
    def spare_page(self) -> int:
        """A page, as layers number them, that no request has: padding writes its keys there, and only padding reads."""
        return self.allocators[0].write_trash_index // self.page_size

    @property
    def spare_places(self) -> range:
        """Places of each layer's keys that no request has: attention turns keys there."""
        return self._whole.spare

    @property
    def windows(self) -> dict[str, SinkWindow]:
        """Request id -> the tokens that it needs, of requests that do without some between."""
        windowed = whole_of(self)
        return {} if windowed is None else windowed.windows

    @property
    def _whole(self) -> WindowedAllocator:
        allocator = whole_of(self)
        assert allocator is not None, "some layers attend to everything"
        return allocator

    def share_held(self) -> float:
        """Share of the cache that requests hold, 0 to 1. Blocks that are only kept for their prefixes are free."""
        free = float(self.pool.num_free_sectors)
        for allocator in self.cache_allocators.values():
            clear = self.pool.count_free_blocks(allocator.index) + len(allocator.ledger.cached_blocks)
            free += clear / allocator.blocks_per_sector
        return max(1.0 - free / self.num_sectors, 0.0)  # the generation thread may free blocks between the two counts

    @override
    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        if self._has_room(state, request_len):
            return True
        while not super().can_store_request_tokens(state, request_len, dry_run):
            if dry_run or not self._give_way(state, request_len):
                return False
        return True

    def _give_way(self, state: RequestState, request_len: int) -> bool:
        """Free what a request lacks of the blocks that are kept for their prefixes, the longest unused first.

        Sectors whose blocks are all free come before. Returns False if there is neither. Admission counts both as free.
        """
        free, name, length = self.pool.num_free_sectors, state.request_id, state.current_len()
        self.pool.try_to_free_sectors()
        if self.pool.num_free_sectors > free:
            return True
        needed = sum(each.needs_new_sectors(name, length, request_len) for each in self.allocators)
        most = max(self.allocators, key=lambda each: len(each.ledger.cached_blocks) * each.bytes_per_block)
        lacking = (needed - self.pool.num_free_sectors) * most.blocks_per_sector
        size, kept = most.blocks_per_sector, most.ledger.cached_blocks
        chosen = dict.fromkeys(block // size for block in islice(kept, max(1, lacking)))
        blocks = [block for each in chosen for block in range(each * size, (each + 1) * size) if block in kept]
        forget(most.ledger, blocks)
        self.pool.free_blocks(most.index, blocks)
        self.pool.try_to_free_sectors()  # other layers' blocks come from whole ones
        return bool(blocks)

    def evict(self, state: RequestState) -> None:
        """Give back the pages that a request no longer reaches."""
        for each in self.allocators:
            each.evict(state.request_id, state.current_len())

    def _has_room(self, state: RequestState, request_len: int) -> bool:
        """True if a request's blocks have room for ``request_len`` more tokens, without those that it needs no more."""
        self.evict(state)
        length = state.current_len() + request_len
        return all(each.has_room(state.request_id, length) for each in self.allocators)

    def is_inside_page(self, state: RequestState) -> bool:
        """True if the next token of a decoding request needs no new page, fills none, and makes none unreachable."""
        return (state.position_offset + 1) % self.page_size > 1 and state.request_id not in self.windows

    def read_inside_page(self, state: RequestState) -> int:
        """``read_by_next`` of a request ``is_inside_page``."""
        past: int = state.position_offset
        return past if whole_of(self) is not None else self.allocators[0].keys_of(state.request_id, past, 0)

    def read_by_next(self, state: RequestState) -> int | None:
        """Tokens that the next step of a decoding request reads per layer; None without room for its new key."""
        windowed, past = whole_of(self), state.position_offset
        needs_all = windowed is None or windowed.window_of(state.request_id) is None
        has_room = needs_all and all(each.has_room(state.request_id, past + 1) for each in self.allocators)
        if not (has_room or self.can_store_request_tokens(state, 1)):
            return None
        if has_room and windowed is not None:
            return past
        most = self.most_read(state)
        return past if most is None else min(past, most)

    def most_read(self, state: RequestState) -> int | None:
        """Most tokens that the next step of one request reads, per layer; None for all of them."""
        windowed, past = whole_of(self), state.current_len()
        window = None if windowed is None else windowed.window_of(state.request_id)
        if windowed is None:  # layers that attend locally, and no others
            return self.allocators[0].keys_of(state.request_id, past, 0)
        if window is None:
            return None
        sliding = [a.get_seqlen_k(past, 0) for a in self.cache_allocators.values() if a is not windowed]
        return max(window.tokens_read(past), *sliding, 0)

    @override
    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        if request_id in self.in_place:
            read_index = None
        super().extend_read_and_write_indices(request_id, past_length, query_length, read_index, write_index)

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in transformers. Without block tables it takes half the time: steps are small, and layers many."""
        if kwargs.get("block_table") is not None:
            kwargs["group"] = self.layer_to_allocator[layer_idx].index
            return super().update(key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
        allocator = self.layer_to_allocator[layer_idx]
        if allocator.by_head:  # type: ignore[attr-defined]
            pages, read = self.write(key_states, value_states, layer_idx, kwargs), kwargs["read_index"][allocator.index]
            kwargs["cu_seq_lens_k"] = self.key_edges(kwargs)
            if not len(read):
                return key_states, value_states
            keys, values = (states.index_select(1, read)[None] for states in pages)
            return keys, values
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][allocator.layer_type]
        read, places = kwargs["read_index"][allocator.index], kwargs["write_index"][allocator.index]
        new = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        keys, values = allocator.update(*new, layer_idx, read, places)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def write(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``update``, but keys and values of the whole cache, each [kv_heads, places, head_dim]."""
        places, (keys, values) = self.places_written(arguments), self._whole.by_head[layer]
        keys.index_copy_(1, places, key[0])
        values.index_copy_(1, places, value[0])
        return keys, values

    def places_written(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Places int64 [tokens] of the new keys, in layers that attend to everything."""
        places: torch.Tensor = arguments["write_index"][self._whole.index]
        return places

    def key_edges(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Edges of the requests' keys int32 [requests + 1 or more], in layers that attend to everything."""
        edges: torch.Tensor = arguments["cu_seq_lens_k"][self._whole.layer_type]
        return edges

    @override
    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        salt = self._salt(request_id)
        found = 0 if salt is None else self._matched(request_id, Salted(prompt_ids, salt)[:])
        request = self.requests.get(request_id)
        if request is not None:
            request.cached_tokens = found
        return found

    def _matched(self, request_id: str, tokens: list[int]) -> int:
        """``search_prefix_match`` of the base class, also for layers that keep the last pages of a prefix only."""
        sectors: list[Any] = self.allocators if self.has_sectors else []
        if not (sectors and self.use_prefix_sharing):
            return super().search_prefix_match(request_id, tokens)
        sectors = sorted(sectors, key=lambda each: isinstance(each, LocalAllocator))  # those with every key know most
        first, unit = sectors[0], max(each.blocks_per_sector for each in sectors)
        request, hashes = self.requests.get(request_id), list[int]()
        has_gap = request is not None and request.sink_window is not None
        if not first.ledger.hash_to_block or (unit > 1 and has_gap):
            return 0
        for known in chained(tokens[:-1], self.page_size):  # the last token of a prompt is always read
            hashes.append(known)
            if not (first.knows(hashes) or isinstance(first, LocalAllocator)):
                break
        count = len(hashes)
        for each in sectors:
            count = each.matched(hashes[:count], unit)
        for each in sectors if count else ():
            each.acquire(request_id, hashes[:count])
        return count * self.page_size

    @override
    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        windowed = whole_of(self)
        if not complete_blocks or (windowed is not None and windowed.evicted_pages.get(state.request_id)):
            return  # a hash covers every token before it: after a gap there is none
        salt = self._salt(state.request_id)
        if salt is not None:
            tokens = Salted(state.initial_tokens + state.generated_tokens, salt)
            super().mark_complete_blocks(TokensOf(state, tokens), complete_blocks)  # type: ignore[arg-type]

    @override
    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor) -> None:
        """Nothing: paged attention reads all tables of a step at once, with evicted pages."""

    def pages_of(self, request_id: str) -> list[Table]:
        """The pages of a request in each group of layers.

        As long as a request has the same pages, they are the same object: long texts have thousands.
        """
        found = []
        for allocator in self.allocators:
            blocks, window = allocator.block_table[request_id], allocator.window_of(request_id)
            known, pages = self.tables.get((request_id, allocator.index), ([], ()))
            if known != blocks:  # equal prefixes become the same blocks, and the length stays
                pages = tuple(map(allocator.page_of, blocks))
                self.tables[request_id, allocator.index] = blocks.copy(), pages
            first = 0 if window is None else window.sink_pages
            found.append(Table(pages, first, allocator.evicted_pages.get(request_id, 0)))
        return found

    @property
    def most_pages(self) -> list[int]:
        """The most pages of a request in each group of layers."""
        return [each.most_pages for each in self.allocators]

    @override
    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.live_keys.pop(request_id, None)
        for allocator in self.cache_allocators.values():
            self.tables.pop((request_id, allocator.index), None)

    def _salt(self, request_id: str) -> int | None:
        """The bits above the tokens of a request, or None: it shares nothing."""
        request = self.requests.get(request_id)
        number = None if request is None else self._number(request)
        return None if number is None else number << self.token_bits

    def _number(self, request: EngineRequest) -> int | None:
        """The number of the request's cache key, or None while live requests use them all."""
        number = self.numbers.get(request.cache_key)
        if number is None:
            most = (1 << (31 - self.token_bits)) - 1
            if len(self.numbers) >= most:
                self.evict_cached_blocks()
                live = set(self.live_keys.values())
                self.numbers = {key: number for key, number in self.numbers.items() if key in live}
            if len(self.numbers) >= most:
                return None
            taken = set(self.numbers.values())
            number = next(n for n in range(len(taken) + 1, 0, -1) if n not in taken)
            self.numbers[request.cache_key] = number
        self.live_keys[request.request_id] = request.cache_key
        return number
