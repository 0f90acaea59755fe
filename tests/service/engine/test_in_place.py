"""Requests have their keys in one piece of memory, where decoding reads them without a copy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LagunaConfig
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from patches import Method, parse, patched
from patches.attention.decode import shared
from patches.attention.decode.shared import MOST_SCORES
from patches.attention.decode.strided import StridedBatch
from service.engine.adapter import manager
from service.engine.adapter.cache import EncodingCache
from service.engine.adapter.runs import NEIGHBOURS, Runs
from service.engine.adapter.windowed import WindowedAllocator
from service.engine.choice import PAGED
from tests.models import VOCAB_SIZE, randomise, tiny_model
from tests.service.engine.test_paged_attention import LIMITS, every_encoding, generated, prompts_for

FAMILIES = ("llama", "deepseek_v3", "bloom", "gemma2", "diffllama", "gpt2", "mistral")
"""Plain; two widths; a bias; layers with two allocators, which copy; two attentions in a layer; added positions;
windows."""

TOGETHER = replace(LIMITS, max_batch_tokens=2048)
"""All prompts are read in one step, and all requests decode together."""


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of requests read in place. Each layer of each step adds one number."""
    numbers, write = [], EncodingCache.write

    def watched(self: EncodingCache, *arguments: Any) -> Any:
        numbers.append(len(self.in_place))
        return write(self, *arguments)

    monkeypatch.setattr(EncodingCache, "write", watched)
    return numbers


def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every step copies its keys."""
    monkeypatch.setattr(WindowedAllocator, "places", lambda *_: {})


def all_by_sums(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """From now on, two sequences have their attention by sums of keys. The members of each such batch, by layer."""
    members: list[list[int]] = []
    attend = shared.ragged_attention

    def watched(*arguments: Any) -> torch.Tensor:
        members.append(arguments[-1].members)
        return attend(*arguments)

    monkeypatch.setattr(shared, "LEAST_SCORES", 1)
    monkeypatch.setattr(shared, "ragged_attention", watched)
    return members


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma2", "mistral"])
def test_every_encoding_has_the_tokens_of_ordinary_calls_by_sums(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with patched(tiny_model(family)[1]) as patch:
        methods = every_encoding(patch)
        prompts = prompts_for(methods, 40)
        expected, reference, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
        members = all_by_sums(monkeypatch)
        tokens, logprobs, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
    if family in ("llama", "mistral"):
        assert min(map(len, members)) > len(methods) // 2
    else:
        assert not members, "two widths in one cache, and a soft limit"
    assert tokens == expected
    assert torch.allclose(logprobs, reference, atol=1e-4)


def test_layers_of_other_shapes_have_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laguna's layers may have other numbers of heads."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_attention_heads_per_layer": [8, 16]}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mlp_layer_types": ["dense"] * 2}
    config = LagunaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=512, **sizes, **heads, **ends)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, 0)
    with patched(model.train(False)) as patch:
        methods = [parse("default")] * 3
        prompts = prompts_for(methods, 40)
        expected, reference, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
        members = all_by_sums(monkeypatch)
        tokens, logprobs, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
    assert members
    assert tokens == expected
    assert torch.allclose(logprobs, reference, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoding_has_the_tokens_of_copied_keys(
    family: str, in_place: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with patched(tiny_model(family)[1]) as patch:
        methods = every_encoding(patch)
        prompts = prompts_for(methods, 40)
        tokens, logprobs, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
        read = max(in_place, default=0)
        in_place.clear()
        copied(monkeypatch)
        expected, reference, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
    assert (read > len(methods) // 3) == (family != "gemma2")
    assert not any(in_place)
    assert tokens == expected
    assert torch.allclose(logprobs, reference, atol=1e-4)


@pytest.mark.parametrize("by_sums", [False, True])
def test_shared_prefixes_and_evicted_keys_are_read_beside_others(
    by_sums: bool, in_place: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ordinary calls copy them. Sums read them as they lie."""
    generator = torch.Generator().manual_seed(1)
    prefix, other = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (24, 30))
    methods: list[Method] = [
        parse({"method": "default"}),
        parse({"method": "streaming", "sink_tokens": 5, "window": 11, "absolute_positions": True}),
        parse({"method": "default"}),
    ]
    prompts = [[*prefix, 7, 8, 9], other, [*prefix, 11]]
    members = all_by_sums(monkeypatch) if by_sums else []
    with patched(tiny_model("llama")[1]) as patch:
        tokens, _, requests = generated(patch, PAGED, methods, prompts, TOGETHER)
        read = set(in_place)
        monkeypatch.setattr(shared, "LEAST_SCORES", MOST_SCORES)
        copied(monkeypatch)
        expected, _, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
    assert tokens == expected
    assert read
    assert max(read) < len(requests), "the window has a gap"
    assert ([0, 1, 2] in members) == by_sums


def test_requests_of_like_lengths_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier request may have left anything behind the keys of another."""
    calls: list[StridedBatch] = []
    attend, give_out = shared.strided_attention, manager.give_out_runs

    def watched(*arguments: Any) -> torch.Tensor:
        calls.append(arguments[-1])
        return attend(*arguments)

    def left_over(cache: Any, allocator: Any) -> None:
        give_out(cache, allocator)
        allocator.cache_tensor.fill_(torch.nan)

    monkeypatch.setattr(shared, "strided_attention", watched)
    monkeypatch.setattr(manager, "give_out_runs", left_over)
    methods: list[Method] = [parse(name) for name in ("alibi", "default", *["linear:4"] * 4)]
    prompts = [[3 + number, *range(9, 9 + length)] for number, length in enumerate((21, 22, 23, 21, 23, 22))]
    with patched(tiny_model("llama")[1]) as patch:
        tokens, logprobs, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
        copied(monkeypatch)
        taken = len(calls)
        expected, reference, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
    assert {len(call.members) for call in calls} == {6}, "a bias of one encoding is none of another"
    assert any(call.bias is not None for call in calls)
    assert len(calls) == taken
    assert tokens == expected
    assert torch.allclose(logprobs, reference, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tokens", "expected"), [("float32", 512, 65), ("float32", 65536, 2048), ("bfloat16", 512, 0)]
)
def test_keys_turn_in_spare_places_of_float32(dtype: str, tokens: int, expected: int) -> None:
    """An eighth of the others at most: those of all blocks, and two that transformers keeps."""
    spare: list[range] = []
    give_out = manager.give_out_runs

    def watched(cache: Any, allocator: Any) -> None:
        give_out(cache, allocator)
        spare.append(cache.spare_places)
        keys, values = allocator.by_head[0]
        assert keys.shape[1] == values.shape[1] == spare[-1].stop

    model = tiny_model("llama")[1].to(getattr(torch, dtype))
    with patched(model) as patch, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(manager, "give_out_runs", watched)
        limits = replace(TOGETHER, cache_tokens=tokens)
        generated(patch, PAGED, [parse("default")], [[5, 6, 7]], limits)
    assert [len(each) for each in spare] == [expected]


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
