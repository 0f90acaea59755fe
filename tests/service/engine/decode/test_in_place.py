"""Requests have their keys in one piece of memory, where decoding reads them without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LagunaConfig

from patches import Method, parse, patched
from patches.attention.decode import shared
from patches.attention.decode.shared import MOST_SCORES
from patches.attention.decode.strided import StridedBatch
from service.engine.adapter.pages import adoption
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.adapter.pages.windowed import WindowedAllocator
from service.engine.choice import PAGED
from tests.models import VOCAB_SIZE, randomise, tiny_model
from tests.service.engine.adapter.test_paged_attention import LIMITS, every_encoding, generated, prompts_for

FAMILIES = ("llama", "deepseek_v3", "bloom", "gemma2", "diffllama", "gpt2", "mistral")
"""Plain; two widths; a bias; layers with two allocators, which copy; two attentions in a layer; added positions;
windows."""

TOGETHER = replace(LIMITS, max_batch_tokens=2048)
"""All prompts are read in one step, and all requests decode together."""


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of requests with their keys in one piece. Each layer of each step adds one number."""
    numbers, write = [], EncodingCache.write

    def watched(self: EncodingCache, *arguments: Any) -> Any:
        numbers.append(sum(len(runs) == 1 for runs in self.in_place.values()))
        return write(self, *arguments)

    monkeypatch.setattr(EncodingCache, "write", watched)
    return numbers


def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every step copies its keys."""
    monkeypatch.setattr(WindowedAllocator, "runs", None)


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
    attend, give_out = shared.strided_attention, adoption.give_out_runs

    def watched(*arguments: Any) -> torch.Tensor:
        calls.append(arguments[-1])
        return attend(*arguments)

    def left_over(cache: Any, allocator: Any) -> None:
        give_out(cache, allocator)
        allocator.cache_tensor.fill_(torch.nan)

    monkeypatch.setattr(shared, "strided_attention", watched)
    monkeypatch.setattr(adoption, "give_out_runs", left_over)
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
    give_out = adoption.give_out_runs

    def watched(cache: Any, allocator: Any) -> None:
        give_out(cache, allocator)
        spare.append(cache.spare_places)
        keys, values = allocator.by_head[0]
        assert keys.shape[1] == values.shape[1] == spare[-1].stop

    model = tiny_model("llama")[1].to(getattr(torch, dtype))
    with patched(model) as patch, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(adoption, "give_out_runs", watched)
        limits = replace(TOGETHER, cache_tokens=tokens)
        generated(patch, PAGED, [parse("default")], [[5, 6, 7]], limits)
    assert [len(each) for each in spare] == [expected]
