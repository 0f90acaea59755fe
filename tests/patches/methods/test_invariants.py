"""Invariants of every method, under drawn models, splits into chunks, batches and temperatures.

The rest of what must hold is beside what it is about. Distances and near pairs are in ``test_position_maps``, merging
in ``test_fused``, biases in ``test_biases``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from patches import Patched, ResolvedRecipe, RopeGeometry, encode, parse, patched, resolve
from patches.attention import fused
from patches.attention.layer import Layer
from patches.batch.segments import Batch
from patches.encoding.temperature import ConstantTemperature
from tests import oracles
from tests.methods import Fields, Row, assume_in_reach, has_effect, rows
from tests.models import tiny_model, tiny_tokens
from tests.patches.distances import effective_distance, plain_distance
from tests.patches.forward import chunked_logits, left_padded, logits_of, relative, slot_of, written

TRAINED, PAIRS, TOLERANCE = 24, 8, 2e-5
TABLE = rows(PAIRS, TRAINED)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("llama", {}),
    "interleaved": ("cohere", {}),
    "window": ("mistral", {"sliding_window": 10}),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Patched]]:
    """Patched once: hypothesis draws many batches for each."""
    sizes: Fields = {"max_position_embeddings": TRAINED, "num_hidden_layers": 1}
    contexts = {}
    for name, (family, overrides) in MODELS.items():
        model = tiny_model(family, attn_implementation="sdpa", **sizes, **overrides)[1]
        contexts[name] = patched(model)
    yield {name: context.__enter__() for name, context in contexts.items()}
    for context in contexts.values():
        context.__exit__(None, None, None)


def model_of(patch: Patched) -> PreTrainedModel:
    return patch.model


requests = st.builds(lambda row, hard: row.requests[hard], st.sampled_from(TABLE), st.integers(0, 1))


# 1. Neutral parameters are plain RoPE


@st.composite
def geometries(draw: st.DrawFn) -> RopeGeometry:
    pairs, whole = draw(st.sampled_from([2, 4, 8, 32, 64])), draw(st.booleans())
    return RopeGeometry(
        head_dim=2 * pairs if whole else 4 * pairs,
        rotary_dim=2 * pairs,
        rope_theta=draw(st.floats(100.0, 1e7)),
        original_max_position_embeddings=draw(st.integers(32, 10_000)),
        max_position_embeddings=1 << 20,
        num_attention_heads=4,
        interleaved=draw(st.booleans()),
    )


@given(st.sampled_from([row.name for row in TABLE if row.identity is not None]), geometries(), st.integers(1, 1 << 20))
def test_settings_without_effect_are_plain_rope(name: str, geometry: RopeGeometry, length: int) -> None:
    """Of any model, and of any input unless the method goes by the reserved length: then within the trained one."""
    pairs, trained = geometry.rotary_dim // 2, geometry.original_max_position_embeddings
    row = next(row for row in rows(pairs, trained) if row.name == name)
    assume(geometry.rotary_dim == geometry.head_dim or not row.whole_head)
    fields: Fields = {"method": name, **(row.identity or {})}
    if name == "custom":
        fields["inv_freq"] = oracles.default(geometry.rope_theta, geometry.rotary_dim)
    if row.bands > 1 or row.reach is not None or row.depends_on_length:
        length = min(length, trained)
    assume_in_reach(fields, geometry)
    resolved = resolve(parse(fields), geometry, length)
    expected = oracles.default(geometry.rope_theta, geometry.rotary_dim)
    assert resolved.inv_freq == pytest.approx(expected, rel=1e-6)
    assert resolved.attention_factor == 1.0
    assert resolved.recipe.score_bias is None
    assert resolved.recipe.attention_temperature is None
    distance = effective_distance(resolved.recipe, min(length, 60))
    plain = plain_distance(min(length, 60)).expand_as(distance)
    assert torch.equal(distance.nan_to_num(-1.0), plain.nan_to_num(-1.0))


@given(st.sampled_from([row for row in TABLE if row.plain_when_short]), st.booleans(), geometries(), st.data())
def test_inside_the_trained_length_dynamic_ones_are_plain(
    row: Row, hard: bool, geometry: RopeGeometry, data: st.DataObject
) -> None:
    fields = row.requests[hard]
    assume_in_reach(fields, geometry)
    trained = fields.get("original_max_position_embeddings", geometry.original_max_position_embeddings)
    within, past = data.draw(st.integers(1, trained)), data.draw(st.integers(2 * trained, 64 * trained))
    short, long = (resolve(parse(fields), geometry, length) for length in (within, past))
    theta = fields.get("rope_theta", geometry.rope_theta)
    plain = resolve(parse({"method": "default", "rope_theta": float(theta)}), geometry, within)
    assert short.inv_freq == pytest.approx(plain.inv_freq, rel=1e-6)
    assert short.attention_factor == 1.0
    assert long != short


# 2. Prefill is decoding, however it is split


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Sizes of the chunks of one input: whole, token by token, or anything between."""
    length = draw(st.integers(2, 60))
    cuts = draw(st.sets(st.integers(1, length - 1)) | st.just(set(range(1, length))) | st.just(set()))
    return [b - a for a, b in pairwise([0, *sorted(cuts), length])]


@every_model
def test_any_split_gives_what_one_pass_gives(name: str, models: dict[str, Patched]) -> None:
    patch = models[name]
    model = model_of(patch)

    @settings(max_examples=50)
    @given(requests, splits(), st.integers(0, 100))
    def over_splits(fields: Fields, chunks: list[int], seed: int) -> None:
        length = sum(chunks)
        assume(has_effect(fields, patch.geometry, length))
        tokens = tiny_tokens(1, length, seed=seed)
        slot = slot_of(patch, fields, length)
        try:
            encoded = encode(torch.arange(length)[None], slot)
            cache = DynamicCache(config=model.config)
            result = chunked_logits(model, tokens, torch.ones_like(tokens), encoded, cache=cache, chunks=chunks)
            assert relative(result, logits_of(model, tokens, slot)) < TOLERANCE
        finally:
            patch.slots.release(slot)

    over_splits()


# 3. A row of a batch is the row alone


@every_model
def test_any_batch_gives_every_row_what_it_gets_alone(name: str, models: dict[str, Patched]) -> None:
    patch = models[name]
    model = model_of(patch)

    @settings(max_examples=30)
    @given(st.lists(st.tuples(requests, st.integers(1, 60)), min_size=2, max_size=6), st.integers(0, 100))
    @torch.no_grad()
    def over_batches(batch: list[tuple[Fields, int]], seed: int) -> None:
        assume(all(has_effect(fields, patch.geometry, length) for fields, length in batch))
        tokens = [tiny_tokens(1, length, seed=seed + row)[0] for row, (_, length) in enumerate(batch)]
        slots = [slot_of(patch, fields, length) for fields, length in batch]
        try:
            ids, mask, positions = left_padded(tokens)
            encoded = encode(positions, torch.tensor(slots)[:, None])
            together = model(ids, attention_mask=mask, position_ids=encoded).logits
            for row, (own, slot) in enumerate(zip(tokens, slots, strict=True)):
                alone = logits_of(model, own[None], slot)[0]
                assert relative(together[row, mask[row].bool()], alone) < TOLERANCE, batch[row]
        finally:
            for slot in slots:
                patch.slots.release(slot)

    over_batches()


# 7. A temperature is the softmax's scale; on cos and sin it is that only where all of the head rotates


def attended(resolved: ResolvedRecipe, scaling: float, head_dim: int, past: int) -> torch.Tensor:
    """Fused attention of 40 tokens, the last ``40 - past`` of them as queries, float32 [2 heads, q, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 40, head_dim, generator=generator) for _ in "qkv")
    query, key = written(query, resolved), written(key, resolved)
    return fused.attend(query[:, :, past:], key, value, resolved, Batch([]), Layer(scaling), q_start=past)


multipliers = st.floats(0.25, 4.0).filter(lambda m: abs(m - 1) > 0.2)


@settings(max_examples=80)
@given(requests, multipliers, st.sampled_from([0, 25, 39]), st.booleans())
def test_a_temperature_on_the_scores_is_the_scale_of_the_softmax(
    fields: Fields, multiplier: float, past: int, partial: bool
) -> None:
    geometry = RopeGeometry(32 if partial else 16, 16, 1e4, TRAINED, TRAINED, num_attention_heads=4)
    assume(not (partial and fields["method"] == "proportional"))
    plain = resolve(parse(fields), geometry, 40)
    plain = replace(plain, recipe=replace(plain.recipe, attention_temperature=None))
    tempered = replace(plain, recipe=replace(plain.recipe, attention_temperature=ConstantTemperature(multiplier)))
    expected = attended(plain, 0.3 * multiplier, geometry.head_dim, past)
    assert relative(attended(tempered, 0.3, geometry.head_dim, past), expected) < TOLERANCE
    assert relative(attended(plain, 0.3, geometry.head_dim, past), expected) > 1e-3


@settings(max_examples=80)
@given(requests, multipliers, st.sampled_from([0, 25, 39]))
def test_a_factor_on_cos_and_sin_is_that_scale_where_everything_rotates(
    fields: Fields, multiplier: float, past: int
) -> None:
    for partial in (False, True):
        geometry = RopeGeometry(32 if partial else 16, 16, 1e4, TRAINED, TRAINED, num_attention_heads=4)
        if partial and fields["method"] == "proportional":
            continue
        plain = resolve(parse(fields), geometry, 40)
        assume(plain.rotates)
        factor = plain.attention_factor * math.sqrt(multiplier)
        scaled = attended(replace(plain, attention_factor=factor), 0.3, geometry.head_dim, past)
        expected = attended(plain, 0.3 * multiplier, geometry.head_dim, past)
        assert (relative(scaled, expected) < TOLERANCE) != partial
