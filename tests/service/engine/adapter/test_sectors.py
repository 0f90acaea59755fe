"""Sectors of a cache: admitted requests never lack a page, however they share prefixes and end."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState

from patches.encoding.masks import ChunkRange, DistanceRange
from service.engine.adapter.pages.adoption import adopt_cache, sized_by_us
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.adapter.pages.local import LocalAllocator
from service.engine.adapter.pages.sectors import chained
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest, SamplingParams
from service.engine.window import LocalWindow, Sectors
from tests.models import VOCAB_SIZE

PAGE, STEP = 4, 16


def cache_of(kinds: list[str], sectors: Sectors, tokens: int, requests: dict[str, EngineRequest]) -> EncodingCache:
    """A cache without a model, for layers of these kinds."""
    config = LlamaConfig(
        num_hidden_layers=len(kinds), hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4
    )
    config.layer_types, size = kinds, sectors.window.page_size
    batching = ContinuousBatchingConfig(page_size=size, num_blocks=1, max_batch_tokens=STEP)

    class Alone:
        tp_size = 1

    with sized_by_us():
        cache: Any = PagedAttentionCache(config, batching, torch.device("cpu"), Alone(), torch.float32)  # type: ignore[arg-type]
    limits = EngineLimits(tokens, 0, page_size=size, max_batch_tokens=STEP)
    adopt_cache(cache, requests, 8, limits, sectors, runs=False)
    found: EncodingCache = cache
    return found


SHAPES = {"5 to 29": (5, 29), "10 to 52": (2, 11), "equal": (2, 2), "few local": (7, 2), "none whole": (0, 4)}
MASKS = {"window": DistanceRange(0, 21), "chunk": ChunkRange(24, 0, 1)}


class Load:
    """Requests that come, read some tokens in each step, and end in any order, as admission lets them."""

    def __init__(self, whole: int, local: int, mask: Any, tokens: int) -> None:
        self.sectors = Sectors(whole, local, LocalWindow((mask,), mask.most_keys, PAGE))
        self.requests, self.tokens, self.used = dict[str, EngineRequest](), tokens, 0
        kinds = ["full_attention"] * whole + ["sliding_attention"] * local
        self.cache = cache_of(kinds, self.sectors, tokens, self.requests)
        self.active: dict[str, tuple[RequestState, int]] = {}
        self.shared = self.admitted = 0

    def admits(self, text: list[int], length: int, window: tuple[int, int] | None = None) -> bool:
        """True if a request for ``length`` tokens that begin with ``text`` has room; it comes then."""
        needed = self.sectors.max_cached_len(window, length, STEP)
        if self.used + needed > self.tokens:
            return False
        name = str(self.admitted)
        self.requests[name] = EngineRequest(text, 0, "", 1, SamplingParams(), sink_window=window)
        state = RequestState(name, [*text, *range(200, 200 + length - len(text))])
        state.position_offset = self.cache.search_prefix_match(name, text)
        self.shared += state.position_offset
        self.active[name] = state, needed
        self.admitted, self.used = self.admitted + 1, self.used + needed
        return True

    def read(self, name: str, new: int) -> None:
        """Have up to ``new`` more tokens of a request in the cache; it ends behind the last one."""
        state, _ = self.active[name]
        new = min(new, len(state.initial_tokens) - state.position_offset)
        assert self.cache.can_store_request_tokens(state, new), f"{name} lacks a page"
        complete = self.cache.count_new_complete_blocks(state, new)
        state.position_offset += new
        self.cache.mark_complete_blocks(state, complete)
        if state.position_offset == len(state.initial_tokens):
            self.end(name)

    def end(self, name: str) -> None:
        self.cache.free_blocks(name)
        self.used -= self.active.pop(name)[1]
        del self.requests[name]

    def all_came_back(self) -> bool:
        self.cache.evict_cached_blocks()
        self.cache.pool.try_to_free_sectors()
        return len(self.cache.pool.free_sectors) == self.cache.num_sectors


@pytest.mark.parametrize(("whole", "local"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_admitted_requests_never_lack_a_page(whole: int, local: int, mask: Any) -> None:
    """Prompts begin alike up to any token, prefixes give way, pages go back, and requests end at any time."""
    chance, load, most = random.Random(whole * 100 + local), Load(whole, local, mask, 900), 0
    bases = [[chance.randrange(200) for _ in range(350)] for _ in range(3)]
    while load.admitted < 300 or load.active:
        length, cut = chance.choice([3, 9, 30, 31, 64, 200, 350]), chance.randrange(350)
        text = [*chance.choice(bases)[:cut], *(chance.randrange(200) for _ in range(350))][:length]
        if load.admitted < 300:
            load.admits(text, length + chance.choice([1, 20]), chance.choice([None, None, None, (3, 17), (0, 9)]))
        for name in chance.sample(sorted(load.active), min(4, len(load.active))):
            load.read(name, chance.choice([1, 1, 2, 4]) if chance.random() < 0.8 else STEP)
            if name in load.active and chance.random() < 0.01:
                load.end(name)
        most = max(most, len(load.active))
    assert most > 3
    assert load.shared > 1000
    assert load.all_came_back()


@pytest.mark.parametrize(("whole", "local"), SHAPES.values(), ids=SHAPES)
def test_growing_chats_never_lack_a_page(whole: int, local: int) -> None:
    """Each turn begins with the turns before it, which end later or earlier; the cache is always full."""
    chance, load = random.Random(whole), Load(whole, local, DistanceRange(0, 21), 1000)
    chats = [[chance.randrange(200) for _ in range(9)] for _ in range(5)]
    for _ in range(400):
        chat = chance.choice(chats)
        if load.admits(chat, len(chat) + 8):
            chat += [chance.randrange(200) for _ in range(chance.choice([1, PAGE, 7]))]
            del chat[: 0 if len(chat) < 250 else 240]
        for name in chance.sample(sorted(load.active), min(6, len(load.active))):
            load.read(name, STEP if chance.random() < 0.8 else 1)
    for name in list(load.active):
        load.end(name)
    assert load.shared > 1000
    assert load.all_came_back()


def test_texts_that_part_within_a_sector_are_both_known() -> None:
    load, text = Load(2, 11, DistanceRange(0, 21), 900), list(range(5 * PAGE))
    for end in ([7] * 30, [8] * 30, [7] * 30, [8] * 30):
        assert load.admits([*text[:-3], *end], 60)
        load.read(str(load.admitted - 1), 60)
    assert load.shared == 2 * 40


def test_a_sector_that_is_known_in_part_is_made_known_again() -> None:
    """A request holds the rest of it while its first pages are forgotten."""
    load, text = Load(7, 2, DistanceRange(0, 64), 4000), [n * n % 199 for n in range(120)]
    assert load.admits(text, 140)
    while load.active and load.active["0"][0].position_offset < 128:
        load.read("0", 8)
    load.cache.evict_cached_blocks()
    load.read("0", 20)
    for name in "12":
        assert load.admits(text, 121)
        while name in load.active:
            load.read(name, 8)
    before = load.shared
    assert load.admits(text, 121)
    assert load.shared - before == 108
    load.end("3")
    assert load.all_came_back()


@pytest.mark.parametrize(("whole", "local"), SHAPES.values(), ids=SHAPES)
def test_no_encoding_reserves_more_than_all_keys(whole: int, local: int) -> None:
    sectors = Sectors(whole, local, LocalWindow((DistanceRange(0, 21),), 21, PAGE))
    for length in range(1, 400, 7):
        every = sectors.max_cached_len(None, length, STEP)
        assert all(sectors.max_cached_len(window, length, STEP) <= every for window in ((3, 17), (0, 9), (40, 1)))


def test_block_tables_are_no_wider_than_the_longest_request() -> None:
    load = Load(2, 11, DistanceRange(0, 21), 900)
    local, whole = sorted(load.cache.most_pages)
    assert local == load.sectors.window.max_cached_len(10_000, STEP) // PAGE
    assert whole == load.cache.num_sectors * 5
    load.cache.cache_allocators["full_attention"].max_length = 30  # type: ignore[attr-defined]
    assert sorted(load.cache.most_pages) == [8, local]


def test_load_counts_no_remainder_of_a_sector() -> None:
    load = Load(5, 29, DistanceRange(0, 21), 900)
    assert load.admits(list(range(60)), 64)
    while load.active:
        load.read("0", STEP)
        assert (load.cache.share_held() > 0) == bool(load.active)


def test_pages_of_different_requests_and_layers_do_not_meet() -> None:
    """Each place of the cache belongs to one page of one layer."""
    requests = {name: EngineRequest([1], 0, name, 1, SamplingParams()) for name in "abc"}
    sectors = Sectors(2, 5, LocalWindow((DistanceRange(0, 9),), 9, PAGE))
    kinds = [
        "sliding_attention" if n in (0, 2, 3, 5, 6) else "full_attention" for n in range(7)
    ]  # the first group slides
    cache = cache_of(kinds, sectors, 400, requests)
    for name in requests:
        state = RequestState(name, list(range(30)))
        assert cache.can_store_request_tokens(state, 30)
    seen = set[int]()
    for name in requests:
        tables = cache.pages_of(name)
        for layer in range(7):
            allocator: Any = cache.layer_to_allocator[layer]
            for states in allocator.get_cache_for_block_table(layer):
                for page in tables[allocator.index].pages:
                    seen.add(states[page].data_ptr())
    pages = -(-30 // PAGE)
    assert len(seen) == 3 * 7 * 2 * pages
    spare = {
        states[cache.spare_page].data_ptr()
        for layer in range(7)
        for states in cache.layer_to_allocator[layer].get_cache_for_block_table(layer)  # type: ignore[attr-defined]
    }
    assert len(spare) == 2 * 5, "groups share it, since only padding reads it"
    assert not spare & seen


# Windows and prefixes


@pytest.mark.parametrize("mask", [DistanceRange(0, 9), DistanceRange(0, 1), DistanceRange(0, 8), ChunkRange(12, 0, 1)])
@pytest.mark.parametrize("step", [1, 5, 16])
def test_pages_go_back_once_no_query_reaches_them(mask: Any, step: int) -> None:
    window, most = LocalWindow((mask,), mask.most_keys, PAGE), 0
    for offset in range(PAGE):
        for position in range(offset, 200, step):
            evicted = window.evicted_pages(position)
            reached = min(mask.key_range(q, q)[0] for q in range(position, position + step))
            assert evicted * PAGE <= reached
            assert (evicted + 2) * PAGE + PAGE > reached, "and soon after"
            assert window.tokens_read(position) == position - evicted * PAGE
            if position % PAGE:
                assert evicted == window.evicted_pages(position - 1), "inside a page nothing changes"
            most = max(most, (-(-(position + step) // PAGE) - evicted) * PAGE)
    assert most <= window.max_cached_len(10_000, step)
    assert window.max_cached_len(10_000, step) - most <= (PAGE if isinstance(mask, DistanceRange) else 12)
    assert window.max_cached_len(7, step) <= 7


@pytest.mark.parametrize("unit", [1, 3])
def test_the_longest_prefix_has_all_pages_of_its_last_window(unit: int) -> None:
    chance = random.Random(3)
    window = LocalWindow((DistanceRange(0, 14),), 14, PAGE)
    for _ in range(200):
        hashes = list(chained([chance.randrange(VOCAB_SIZE) for _ in range(60)], PAGE))
        known = {each for each in hashes if chance.random() < 0.8}
        allocator = LocalAllocator.__new__(LocalAllocator)
        allocator.local, allocator.tokens_per_page, allocator.blocks_per_sector = window, PAGE, 1
        allocator.ledger = type("Ledger", (), {"hash_to_block": dict.fromkeys(known, 0)})()  # type: ignore[assignment]
        fitting = [
            count
            for count in range(unit, len(hashes) + 1, unit)
            if known.issuperset(hashes[window.evicted_pages(count * PAGE) : count])
        ]
        assert allocator.matched(hashes, unit) == max(fitting, default=0)
