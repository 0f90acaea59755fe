"""The memory of a cache on a CPU: within a layer, the keys of one head follow one another.

To read a few hundred bytes of each place would take up to twice as long. Behind the places of all blocks, each layer
has spare ones.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from patches import ALIKE
from service.engine.adapter.compatibility import adopt, check_attributes
from service.engine.adapter.pages.runs import Runs
from service.engine.adapter.pages.windowed import WindowedAllocator
from service.engine.limits import spare_places


def give_out_runs(cache: PagedAttentionCache, allocator: WindowedAllocator) -> None:
    """Give each layer its keys and values head by head in other memory, and each request ``Runs`` of its pages.

    For an allocator that has the ``cache`` alone, before the first request.
    """
    pool, theirs = allocator.pool, allocator.cache_tensor
    layers, page = len(allocator.layer_indices), allocator.tokens_per_page
    (_, _, heads, width), places = theirs.shape, len(theirs) * theirs.shape[1] // (2 * layers)
    spare = spare_places(places, theirs.dtype)
    kind: dict[str, Any] = {"dtype": theirs.dtype, "device": theirs.device}
    # Their views, which we never ask for, must fail. Without the last one, their memory is free.
    del allocator._copy_view, allocator._kv_token_views, allocator._kv_page_views, allocator.cache_tensor, theirs
    cache.cache_tensor = torch.empty(0)
    parts = torch.empty(2 * layers, heads, places + spare, width, **kind)
    parts[:, :, :places].zero_()  # memory of spare places is taken when they are first written
    cache.cache_tensor = allocator.cache_tensor = parts

    def clear(blocks: range) -> None:
        parts[:, :, blocks.start * page : blocks.stop * page].zero_()

    check_attributes(allocator.ledger, BlockLedger)
    adopt(
        pool._free_blocks[allocator.index],
        Runs,
        reserved={},
        neighbourhoods={},
        ahead=-(-ALIKE // page),
        ledger=allocator.ledger,
        clear=clear,
    )
    while pool.free_sectors:
        pool.allocate_sector(allocator.index)
    for number, layer in enumerate(allocator.layer_indices):
        allocator.by_head[layer] = parts[2 * number], parts[2 * number + 1]
    allocator.spare = range(places, places + spare)
    allocator.block_physical_stride = page
    allocator.write_trash_index = page * allocator.blocks_per_sector
