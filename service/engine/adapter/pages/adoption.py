"""The cache that transformers builds, and how it and its allocators become ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
)
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    FullAttentionCacheAllocator,
)

from patches import LayersInPlace
from service.engine.adapter.compatibility import adopt
from service.engine.adapter.pages.by_head import give_out_runs
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.adapter.pages.local import LocalAllocator
from service.engine.adapter.pages.sectors import SectorAllocator, divide
from service.engine.adapter.pages.windowed import WindowedAllocator
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest
from service.engine.thread.out_of_memory import whole_card
from service.engine.window import Sectors


def adopt_cache(
    cache: PagedAttentionCache,
    requests: dict[str, EngineRequest],
    token_bits: int,
    limits: EngineLimits,
    sectors: Sectors | None,
    *,
    runs: bool,
) -> None:
    """Make ``cache`` ours, before the first request. Prompts have tokens of at most ``token_bits``.

    Its memory is divided into ``sectors``, or each request gets ``runs`` of places head by head, or neither.
    """
    keys: dict[str, Any] = {"numbers": {}, "live_keys": {}, "token_bits": token_bits}
    kept: dict[str, Any] = {"in_place": {}, "tables": {}, "kept": LayersInPlace()}
    adopt(cache, EncodingCache, requests=requests, **keys, **kept)
    whole, local = (cache.cache_allocators.get(kind) for kind in (FULL_ATTENTION, SLIDING_ATTENTION))

    def own(*tables: str) -> dict[str, Any]:
        named: dict[str, Any] = {name: {} for name in ("windows", "evicted_pages", "by_head", *tables)}
        return {"requests": requests, "turns": iter(()), "spare": range(0), **named}

    if sectors is None:
        adopt(whole, WindowedAllocator, **own())  # all layers attend to everything
        if runs:
            give_out_runs(cache, whole)  # type: ignore[arg-type]
    else:
        sizes: dict[str, Any] = {"width": sectors.width, "max_length": limits.max_length}
        if whole is not None:
            adopt(whole, SectorAllocator, **sizes, **own("left", "chains"))
        step = {"local": sectors.window, "step_tokens": limits.max_batch_tokens}
        adopt(local, LocalAllocator, **sizes, **step, **own("left", "chains"))
        divide(cache, sectors, limits.cache_tokens)
    tables = list(cache.cache_allocators.values())
    vars(cache).update(page_size=limits.page_size, allocators=tables, has_sectors=sectors is not None)


def _paged(**arguments: Any) -> FullAttentionCacheAllocator:
    allocator = FullAttentionCacheAllocator(**arguments)
    vars(allocator)["sliding_window"] = None  # a cache without other layers asks for it
    return allocator


@contextmanager
def sized_by_us() -> Iterator[None]:
    """Within it, the manager does not compare its cache with free memory, which our limits already fit.

    It would count a mask of all batch tokens by all cached ones, and copies of all keys. Our attention makes neither.
    To learn the free memory, it waits for the whole card. It makes no rings for layers that slide.
    """
    with whole_card:
        theirs = PagedAttentionMemoryHandler.get_available_memory
        PagedAttentionMemoryHandler.get_available_memory = lambda self: sys.maxsize  # type: ignore[method-assign]
        rings = ATTN_TYPE_TO_ALLOCATOR[SLIDING_ATTENTION]
        ATTN_TYPE_TO_ALLOCATOR[SLIDING_ATTENTION] = _paged  # type: ignore[assignment]
        try:
            yield
        finally:
            PagedAttentionMemoryHandler.get_available_memory = theirs  # type: ignore[method-assign]
            ATTN_TYPE_TO_ALLOCATOR[SLIDING_ATTENTION] = rings
