"""Attention mass by distance: transformers' own weights, formulas in float64, and a model that does not notice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from patches import AttentionMass, Patched, encode, patched
from patches.attention import mass as mass_module
from patches.attention.mass import distance_edges
from tests import oracles
from tests.methods import Fields
from tests.models import ROPE_THETA, TRAINED_LENGTH, tiny_model, tiny_tokens
from tests.patches.forward import logits_of, slot_of

LENGTH, QUERIES, HEAD_DIM, HEADS = 90, 30, 16, 4
METHODS: list[Fields] = [
    {"method": "default"},
    {"method": "yarn", "factor": 4.0},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 16},
    {"method": "lm_infinite", "n_global": 5, "n_local": 16},
    {"method": "alibi"},
    {"method": "kerple_log"},
    {"method": "none"},
]
by_method = pytest.mark.parametrize("fields", METHODS, ids=lambda fields: fields["method"])


def observed(
    patch: Patched,
    fields: Fields,
    tokens: torch.Tensor,
    chunks: Sequence[int] = (LENGTH,),
) -> AttentionMass:
    """The mass of one sequence [1, length], fed in ``chunks``."""
    length = tokens.shape[1]
    slot, cache = slot_of(patch, fields, length), DynamicCache(config=patch.model.config)
    mass = AttentionMass(length - QUERIES, length)
    start = 0
    for size in chunks:
        position_ids = encode(torch.arange(start, start + size)[None], slot)
        with torch.no_grad(), patch.observing(mass.observe):
            patch.model(tokens[:, start : start + size], position_ids=position_ids, cache=cache, use_cache=True)
        start += size
    assert start == length
    return mass


def bucketed(weights: np.ndarray, queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean mass [heads, buckets], on the first four keys [heads], and entropy [heads], one weight at a time.

    They are of the last ``queries`` rows of ``weights`` [heads, length, length].
    """
    heads, length, _ = weights.shape
    edges = distance_edges(length)
    mass, first, entropy = np.zeros((heads, len(edges) - 1)), np.zeros(heads), np.zeros(heads)
    for head in range(heads):
        for i in range(length - queries, length):
            for j in range(i + 1):
                weight = float(weights[head, i, j])
                bucket = next(b for b, (low, high) in enumerate(pairwise(edges)) if low <= i - j < high)
                mass[head, bucket] += weight / queries
                first[head] += weight / queries if j < 4 else 0.0
                entropy[head] -= weight * np.log(weight) / queries if weight > 0 else 0.0
    return mass, first, entropy


def test_edges_double_up_to_the_length() -> None:
    assert distance_edges(1) == [0, 1]
    assert distance_edges(2) == [0, 1, 2]
    assert distance_edges(8) == [0, 1, 2, 4, 8]
    assert distance_edges(9) == [0, 1, 2, 4, 8, 9]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gemma2", "cohere2", "gpt_oss", "diffllama"])
def test_default_is_what_transformers_attends_to(family: str) -> None:
    """Grouped heads, partial rotation, a soft limit, layers that slide or do not rotate. Also sinks that take a share,
    and layers that attend twice."""
    model, tokens = tiny_model(family)[1], tiny_tokens(1, LENGTH)
    with torch.no_grad():
        own = model(tokens, output_attentions=True, use_cache=False).attentions
    with patched(model) as patch:
        mass = observed(patch, {"method": "default"}, tokens)
    assert mass.layers == list(range(len(own)))
    for layer, weights in enumerate(own):
        expected = bucketed(weights[0].numpy(), QUERIES)
        for result, wanted in zip((mass.mass(), mass.first_keys(), mass.entropy()), expected, strict=True):
            np.testing.assert_allclose(result[layer], wanted, rtol=0, atol=1e-5)
    total = mass.mass().sum(-1)
    if family == "gpt_oss":
        assert (total < 0.999).all(), "sinks take their share"
    else:
        np.testing.assert_allclose(total, 1.0, rtol=0, atol=1e-5)


def raw_states(model: PreTrainedModel, tokens: torch.Tensor, slot: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer: queries [heads, length, head_dim] and keys [kv_heads, ...] as projected, before any rotation."""
    states: dict[str, np.ndarray] = {}
    handles = []
    for layer, block in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj"):

            def note(_: object, __: object, output: torch.Tensor, key: str = f"{layer}{name}") -> None:
                states[key] = output[0].unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1).double().numpy()

            handles.append(getattr(block.self_attn, name).register_forward_hook(note))
    logits_of(model, tokens, slot)
    for handle in handles:
        handle.remove()
    return [(states[f"{layer}q_proj"], states[f"{layer}k_proj"]) for layer in range(len(model.model.layers))]


@by_method
def test_every_method_attends_by_its_formula(fields: Fields) -> None:
    """float64 scores of the projected queries and keys, from the papers' formulas."""
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, LENGTH)
    how = oracles.Model(ROPE_THETA, HEAD_DIM, TRAINED_LENGTH, TRAINED_LENGTH, HEADS, HEAD_DIM**-0.5)
    with patched(model) as patch:
        mass = observed(patch, fields, tokens)
        states = raw_states(model, tokens, slot_of(patch, fields, LENGTH))
    for layer, (q, k) in enumerate(states):
        scores = oracles.scores(q, k, oracles.encoding(fields, how, LENGTH), how)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = bucketed(weights / weights.sum(-1, keepdims=True), QUERIES)
        for result, wanted in zip((mass.mass(), mass.first_keys(), mass.entropy()), expected, strict=True):
            np.testing.assert_allclose(result[layer], wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(mass.mass().sum(-1), 1.0, rtol=0, atol=1e-5)


def test_a_window_leaves_the_middle_empty() -> None:
    """Window of 16 and 5 first keys: queries 60 .. 89 reach distances 0 .. 15 and 55 .. 89, nothing between."""
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        mass = observed(patch, {"method": "lm_infinite", "n_global": 5, "n_local": 16}, tokens)
    buckets = mass.mass()
    assert mass.edges == [0, 1, 2, 4, 8, 16, 32, 64, 90]
    assert (buckets[..., 5] == 0).all(), "distances 16 .. 31 lie outside"
    assert (buckets[..., 6:].sum(-1) >= mass.first_keys() - 1e-12).all()
    assert (mass.first_keys() > 0).all()


@by_method
def test_chunks_do_not_matter(fields: Fields) -> None:
    model, tokens = tiny_model("llama", attn_implementation="sdpa")[1], tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        whole = observed(patch, fields, tokens)
        parts = observed(patch, fields, tokens, (50, 17, 1, 22))
    for name in ("mass", "first_keys", "entropy"):
        np.testing.assert_allclose(getattr(parts, name)(), getattr(whole, name)(), rtol=0, atol=1e-5)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        whole = observed(patch, {"method": "default"}, tokens)
        monkeypatch.setattr(mass_module, "BLOCK_WEIGHTS", 7 * HEADS * LENGTH)
        blocks = observed(patch, {"method": "default"}, tokens)
    np.testing.assert_allclose(blocks.mass(), whole.mass(), rtol=0, atol=1e-7)


@by_method
def test_the_model_does_not_notice(fields: Fields) -> None:
    model, tokens = tiny_model("llama", attn_implementation="sdpa")[1], tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        slot = slot_of(patch, fields, LENGTH)
        expected = logits_of(model, tokens, slot)
        with patch.observing(AttentionMass(0, LENGTH).observe):
            assert torch.equal(logits_of(model, tokens, slot), expected)
        assert torch.equal(logits_of(model, tokens, slot), expected)


def test_only_forwards_inside_and_on_this_thread_are_seen() -> None:
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 20)
    with patched(model) as patch:
        mass = AttentionMass(0, 20)
        with patch.observing(mass.observe):
            other = threading.Thread(target=logits_of, args=(model, tokens))
            other.start()
            other.join()
        logits_of(model, tokens)
        assert mass.layers == []
        with patch.observing(mass.observe):
            logits_of(model, tokens)
        logits_of(model, tokens)
        assert mass.layers == [0, 1]
        mass.mass()  # raises had any query been seen twice


def test_observing_ends_with_an_exception() -> None:
    model = tiny_model("llama")[1]
    with patched(model) as patch:
        mass = AttentionMass(0, 20)
        with pytest.raises(IndexError), patch.observing(mass.observe):
            logits_of(model, torch.full((1, 20), 10_000))
        logits_of(model, tiny_tokens(1, 20))
        assert mass.layers == [], "unseen"
        with pytest.raises(ValueError, match="one sequence"), patch.observing(mass.observe):
            logits_of(model, tiny_tokens(2, 20))
        logits_of(model, tiny_tokens(1, 20))
        assert mass.layers == [], "unseen"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="are none"):
        AttentionMass(5, 5)
    model, tokens = tiny_model("llama")[1], tiny_tokens(1, 40)
    with patched(model) as patch:
        mass = AttentionMass(10, 30)
        with pytest.raises(ValueError, match="not every query"):
            mass.mass()
        with patch.observing(mass.observe):
            logits_of(model, tokens[:, :20])
        with pytest.raises(ValueError, match="not every query"):
            mass.mass()
        slot = slot_of(patch, {"method": "streaming", "sink_tokens": 3, "window": 8}, 40)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :30], position_ids=encode(torch.arange(30)[None], slot), cache=cache)
            patch.evict(cache, slot)
            with pytest.raises(ValueError, match="evict nothing"), patch.observing(AttentionMass(30, 40).observe):
                model(tokens[:, 30:], position_ids=encode(torch.arange(30, 40)[None], slot), cache=cache)
