"""Requests have their keys in one piece of memory, where decoding reads them without a copy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from patches import Method, parse, patched
from service.engine.adapter.cache import EncodingCache
from service.engine.adapter.runs import Runs
from service.engine.adapter.windowed import WindowedAllocator
from service.engine.choice import PAGED
from tests.models import VOCAB_SIZE, tiny_model
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
    monkeypatch.setattr(WindowedAllocator, "first_keys", lambda *_: {})


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
    assert not in_place
    assert tokens == expected
    assert torch.allclose(logprobs, reference, atol=1e-4)


def test_shared_prefixes_and_evicted_keys_are_copied_beside_others(
    in_place: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    prefix, other = (torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (24, 30))
    methods: list[Method] = [
        parse({"method": "default"}),
        parse({"method": "streaming", "sink_tokens": 5, "window": 11}),
        parse({"method": "default"}),
    ]
    prompts = [[*prefix, 7, 8, 9], other, [*prefix, 11]]
    with patched(tiny_model("llama")[1]) as patch:
        tokens, _, requests = generated(patch, PAGED, methods, prompts, TOGETHER)
        read = set(in_place)
        copied(monkeypatch)
        expected, _, _ = generated(patch, PAGED, methods, prompts, TOGETHER)
    assert tokens == expected
    assert read
    assert max(read) < len(requests), "the window has a gap"


def test_blocks_are_in_a_row_while_there_is_room() -> None:
    """Requests come, grow and go at random. None has a block of another, and nearly all have theirs in a row."""
    random.seed(3)
    free = Runs(1)
    free.reserved = {}
    for block in range(2, 130):
        free.add_tree(block)
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


def test_without_a_row_any_free_blocks_are_taken() -> None:
    free = Runs(1)
    free.reserved = {}
    for block in (2, 4, 6, 8):
        free.add_tree(block)
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
