"""Checkpoints that declare dual chunk attention (Qwen2.5-1M), which vLLM computes and transformers passes over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches import Patched, UnsupportedModel, effective_distance, parse, patched, ranges_by_rule
from tests.models import tiny_model, tiny_tokens
from tests.oracles.distances import chunk_llama_distance
from tests.patches.forward import logits_of, relative, slot_of
from tests.scalings import IN_CHUNKS, Fields, carried

TRAINED, CHUNK = 48, 32
DECLARED: Fields = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": TRAINED}
PLAIN: Fields = {"method": "default", "rope_theta": 1e4}


def model_of(entries: Fields | None, rope_parameters: Fields | None = None, **sizes: Any) -> PreTrainedModel:
    declared = {} if entries is None else {"dual_chunk_attention_config": entries}
    return tiny_model("qwen2", rope_parameters, max_position_embeddings=128, **declared, **sizes)[1]


def test_the_published_entries_are_what_vllm_computes() -> None:
    """Chunks of 253,952 tokens, and scores times m^2 with m = 0.1 ln(n / L0) + 1."""
    with carried(IN_CHUNKS["Qwen2.5-7B-Instruct-1M"]) as patch:
        geometry = patch.geometry
        default = patch.resolve("default", 1_010_000)
        within = patch.resolve("default", 262_144)
    assert (geometry.original_max_position_embeddings, geometry.max_position_embeddings) == (262_144, 1_010_000)
    indices = [0, 1, 8191, 253_951, 253_952, 262_144, 300_000, 507_904, 600_000, 1_009_999]
    distance = effective_distance(default.recipe, torch.tensor(indices), torch.tensor(indices))[..., 0]
    for row, m in enumerate(indices):
        for column, n in enumerate(indices[: row + 1]):
            assert distance[row, column] == chunk_llama_distance(m, n, 262_144, 8192), (m, n)
    factors = [recipe.recipe.attention_temperature(torch.tensor([0])) for recipe in (default, within)]  # type: ignore[misc]
    assert factors[0].item() == pytest.approx((0.1 * math.log(1_010_000 / 262_144) + 1) ** 2)
    assert factors[1].item() == 1.0


@pytest.mark.parametrize("length", [CHUNK, TRAINED, 120])
def test_the_default_is_the_declared_one(length: int) -> None:
    tokens, model, plain = tiny_tokens(1, length), model_of(DECLARED), model_of(None)
    asked = {"method": "dual_chunk", "chunk_size": 40, "local_window": 8}
    temperature = {"kind": "reserved_length", "length": TRAINED}
    with torch.no_grad():
        expected = plain(tokens).logits
    with patched(plain) as patch:
        declared = logits_of(plain, tokens, slot_of(patch, asked | {"attention_temperature": temperature}, length))
    with patched(model) as patch:
        found = logits_of(model, tokens, slot_of(patch, {"method": "default"}, length))
        as_in_transformers = logits_of(model, tokens, slot_of(patch, PLAIN, length))
        with torch.no_grad():
            assert relative(model(tokens).logits, found) < 1e-5, "without an encoding, it is that of the length"
    assert relative(found, declared) < 1e-6
    assert relative(as_in_transformers, expected) < 1e-6
    assert (relative(found, expected) < 1e-5) == (length == CHUNK)


def test_without_a_trained_length_there_is_no_temperature() -> None:
    with patched(model_of({"chunk_size": 40, "local_size": 8})) as patch:
        assert patch.geometry.native == parse({"method": "dual_chunk", "chunk_size": 40, "local_window": 8})
        assert patch.geometry.original_max_position_embeddings == 128


@pytest.fixture
def patch() -> Any:
    with patched(model_of(DECLARED)) as patch:
        yield patch


def test_another_map_takes_its_place(patch: Patched) -> None:
    with patched(model_of(None)) as plain:
        for fields in ({"method": "self_extend"}, {"method": "streaming"}, {"method": "dual_chunk", "chunk_size": 20}):
            fields = {**fields, "original_max_position_embeddings": TRAINED}
            assert patch.resolve(fields, 120) == plain.resolve(fields, 120)
    with pytest.raises(ValueError, match="base: this model's own encoding moves positions already"):
        patch.resolve({"method": "self_extend", "base": "default"}, 120)


@pytest.mark.parametrize("fields", [{"method": "default"}, {"method": "self_extend"}, PLAIN])
def test_its_echo_is_the_same_again(patch: Patched, fields: Fields) -> None:
    echo = patch.describe(fields, 120)
    assert patch.resolve(echo, 120) == patch.resolve(fields, 120)
    assert patch.describe(echo, 120) == {**echo, "requested": echo["method"]}


def test_auto_keeps_it_up_to_the_declared_length(patch: Patched) -> None:
    ranges = [(end, method.method) for end, method in ranges_by_rule(patch.geometry)]
    assert ranges == [(TRAINED, "default"), (128, "default"), (None, "dynamic_yarn")]


@pytest.mark.parametrize(
    ("entries", "rope_parameters", "reason"),
    [
        ({"chunk_size": 40}, None, "its dual_chunk_attention_config has no local_size"),
        (DECLARED, {"rope_type": "linear", "factor": 2.0}, "is for plain RoPE, and its configuration has another"),
        ({**DECLARED, "local_size": 40}, None, "local_window: must be below chunk_size"),
        ({**DECLARED, "chunk_size": "many"}, None, "is not one we carry: chunk_size"),
        ("many", None, "its dual_chunk_attention_config is no object"),
    ],
)
def test_entries_that_cannot_be_served_are_refused(
    entries: Fields, rope_parameters: Fields | None, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason), patched(model_of(entries, rope_parameters)):
        raise AssertionError("never entered")
