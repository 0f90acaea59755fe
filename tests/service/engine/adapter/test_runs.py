"""Blocks of requests follow one another, and those of like lengths are neighbours."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from patches import parse, patched
from service.engine.adapter.pages.runs import NEIGHBOURS, Runs
from service.engine.adapter.pages.windowed import WindowedAllocator
from service.engine.choice import PAGED
from tests.models import tiny_model
from tests.service.engine.adapter.test_paged_attention import LIMITS, generated, prompts_for
from tests.service.engine.decode.test_in_place import TOGETHER


def runs(blocks: Iterable[int]) -> Runs:
    free = Runs(1)
    free.reserved, free.neighbourhoods, free.ledger, free.ahead, free.clear = {}, {}, BlockLedger(), 2, lambda _: None
    for block in blocks:
        free.add_tree(block)
    return free


def test_blocks_are_in_a_row_while_there_is_room() -> None:
    """Requests come, grow and go at random. None has a block of another, and nearly all have theirs in a row."""
    random.seed(3)
    free = runs(range(2, 130))
    tables: dict[str, list[int]] = {}
    most: dict[str, int] = {}
    in_a_row = grown = 0
    for step in range(3000):
        if len(tables) < 6 and random.random() < 0.3:
            tables[str(step)], most[str(step)] = [], random.randint(1, 12)
        if tables:
            name = random.choice(list(tables))
            if len(tables[name]) == most[name]:
                free.reserved.pop(name, None)
                free.add_leaves(tables.pop(name))
            else:
                tables[name] += free.take(name, 1, tables[name], most[name])
                grown += 1
                in_a_row += tables[name] == list(range(tables[name][0], tables[name][0] + len(tables[name])))
        held = [block for table in tables.values() for block in table]
        assert len(held) == len(set(held))
        assert len(free) == 128 - len(held)
    assert in_a_row == grown


def test_requests_of_like_lengths_are_equally_far_apart() -> None:
    """Also if requests of other lengths come between them, and if one ends."""
    free = runs(range(1, 600))
    tables = {name: free.take(name, 1, [], length) for name, length in zip("aAbBcC", (7, 3, 8, 4, 7, 3), strict=True)}
    assert [tables[name][0] for name in "abc"] == [8, 16, 24]
    assert [tables[name][0] for name in "ABC"] == [136, 140, 144]
    assert len(free.reserved["A"]) == len(free.reserved["B"]) == 3, "the fourth block is free, so A may read it"
    free.reserved.pop("b")
    free.add_leaves(tables["b"])
    assert free.take("d", 1, [], 8) == [32], "not where b was: its prefix may be kept"
    assert free.take("other", 2, [], 2) == [200, 201], "behind the neighbourhoods of the others"


def test_lengths_that_come_no_more_claim_nothing() -> None:
    free = runs(range(1, 2000))
    for length in range(2, 32, 2):
        free.take(str(length), 1, [], length)
    assert sum(map(len, free.neighbourhoods.values())) <= 1000
    starts = [free.take(f"{number} of them", 1, [], 4)[0] for number in range(4)]
    assert [b - a for a, b in itertools.pairwise(starts)] == [4] * 3


def test_a_neighbourhood_grows_at_its_end() -> None:
    """Up to that of other lengths, if there is one. Then another begins."""
    free = runs(range(4, 400))
    starts = [free.take(str(number), 1, [], 4)[0] for number in range(2 * NEIGHBOURS)]
    assert starts == list(range(4, 4 + 8 * NEIGHBOURS, 4))
    free = runs(range(4, 400))
    starts = [free.take("a", 1, [], 4)[0], free.take("other", 1, [], 2)[0]]
    starts += [free.take(str(number), 1, [], 4)[0] for number in range(NEIGHBOURS)]
    assert starts[1] == starts[0] + 4 * NEIGHBOURS
    assert starts[2:-1] == list(range(8, 4 + 4 * NEIGHBOURS, 4))
    assert starts[-1] >= starts[1] + 2 * NEIGHBOURS


def test_prefixes_used_lately_are_no_neighbours_rows() -> None:
    """A row with one is left out. One that was used longest ago gives way, and so does the rest of its row."""
    free = runs(range(4, 200))
    free.take("first", 1, [], 4)
    for number, block in enumerate((8, 9, 10, 11, 18, 19, 12, 16)):
        free._remove(block)
        free.ledger.register_new_hash(block, number)
        free.ledger.release(block)
    assert free.take("second", 3, [], 3) == [8, 9, 10]
    assert free.take("third", 3, [], 3) == [20, 21, 22]
    assert list(free.ledger.cached_blocks) == [18, 19, 12, 16]


def test_without_room_for_a_neighbourhood_rows_are_equally_far_apart() -> None:
    free = runs(range(1, 60))
    starts = [free.take(str(length), 1, [], length)[0] for length in (5, 8, 6, 7)]
    assert starts == [8, 16, 24, 32]
    assert free.take("long", 1, [], 18) == [40], "no multiple of 18 is free"


@pytest.mark.parametrize(
    ("length", "distance"), [(1, 2), (2, 2), (3, 4), (5, 8), (8, 8), (16, 16), (17, 18), (32, 32), (130, 144)]
)
def test_rows_lose_little_room(length: int, distance: int) -> None:
    free = runs(range(distance, 4 * distance))
    starts = [free.take(str(number), 1, [], length)[0] for number in range(3)]
    assert starts == [distance, 2 * distance, 3 * distance]


def test_behind_a_prefix_nothing_gives_way() -> None:
    """Keys that follow a prefix elsewhere are copied anyway."""
    free = runs(range(1, 12))
    kept = free.take("ended", 8, [], 8)
    for number, block in enumerate(kept):
        free.ledger.register_new_hash(block, number)
        free.ledger.release(block)
    free.ledger.acquire(kept[1])
    taken = free.take("behind", 2, [kept[1]], 9)
    assert not set(taken) & set(kept)
    assert len(free.ledger.cached_blocks) == 7


def test_the_end_of_a_kept_prefix_gives_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[int]] = []
    free_blocks = WindowedAllocator.free_blocks

    def watched(self: WindowedAllocator, request_id: str, no_cache: bool = False) -> None:
        table = list(self.block_table.get(request_id, []))
        free_blocks(self, request_id, no_cache)
        kept.append([table.index(block) for block in self.ledger.cached_blocks])

    monkeypatch.setattr(WindowedAllocator, "free_blocks", watched)
    with patched(tiny_model("llama")[1]) as patch:
        generated(patch, PAGED, [parse("default")], prompts_for([parse("default")], 60), TOGETHER)
    assert len(kept[0]) > 2
    assert kept[0] == sorted(kept[0], reverse=True)


def test_a_request_loses_what_another_takes_of_its_row() -> None:
    cleared: list[range] = []
    free = runs(range(1, 7))
    free.clear = cleared.append
    table = free.take("a", 1, [], 4)
    assert table == [1]
    assert free.end("a", table) == 4, "two more are clear"
    assert cleared == [range(1, 4)]
    assert free.take("a", 1, table, 4) == [2]
    assert (free.end("a", [1, 2]), cleared.pop()) == (5, range(4, 5))
    free.add_leaves([2])
    free.reserved["a"] = range(2, 5)
    taken = free.take("b", 4, [], 4)
    assert {step for block in cleared[2:] for step in block} == set(taken)
    assert free.end("a", table) == 2


def test_blocks_kept_for_their_prefixes_give_way_to_a_row() -> None:
    """Those that were used last stay, and so do all while others are in a row."""
    free = runs(range(15))
    tables = [free.take(str(number), 3, [], 3) for number in range(4)]
    free.reserved.clear()
    for number, block in enumerate(block for table in (tables[2], tables[0], tables[1], tables[3]) for block in table):
        free.ledger.register_new_hash(block, 100 + number)
        free.ledger.release(block)
    assert len(free.ledger.cached_blocks) == 12
    assert free.take("fits", 1, [], 1) == [3]
    assert len(free.ledger.cached_blocks) == 12
    assert free.take("first", 2, [], 3) == tables[2][:2]
    assert free.take("second", 3, [], 3) == tables[0]
    assert list(free.ledger.cached_blocks) == tables[1] + tables[3]
    assert sorted(free.ledger.hash_to_block) == list(range(106, 112))
    assert len(free) == 2 + 1


def test_kept_blocks_give_way_to_neighbours_once() -> None:
    """Rows beside others take the oldest kept ones, from a beginning on, and not the same again."""
    free = runs(range(128))
    tables = [free.take(str(number), 4, [], 4) for number in range(32)]
    free.reserved.clear()
    for number, block in enumerate(block for table in (*tables[16:], *tables[:16]) for block in table):
        free.ledger.register_new_hash(block, number)
        free.ledger.release(block)
    starts = []
    for number in range(32):
        taken = free.take(f"next {number}", 4, [], 4)
        starts.append(taken[0])
        for block in taken:
            free.ledger.register_new_hash(block, 1000 + 4 * number + block % 4)
            free.ledger.release(block)
        free.reserved.clear()
    assert starts == [*range(64, 128, 4), *range(0, 64, 4)]


def test_without_a_row_any_free_blocks_are_taken() -> None:
    free = runs((2, 4, 6, 8))
    assert sorted(free.take("a", 3, [], 3)) != [2, 3, 4]
    assert len(free) == 1
    assert free.take("b", 1, [], 5)
    assert len(free) == 0


def test_free_blocks_stay_counted_while_requests_end() -> None:
    """transformers moves them to other allocators at such a moment, and the cache would look full."""
    with patched(tiny_model("llama")[1]) as patch:
        pool = PAGED.built(patch, LIMITS)._create_batch_processor().cache.pool  # type: ignore[union-attr]
        free = pool.count_free_blocks(0)
        pool.try_to_free_sectors()
        assert pool.count_free_blocks(0) == free > 0
        assert pool.num_free_sectors == 0
