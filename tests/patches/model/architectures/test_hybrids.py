"""Hybrids: an encoding applies to the layers that attend, and recurrent layers stay as they are."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from patches import encode, patched
from tests.field.configurations import tiny_model
from tests.models import tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of
from tests.patches.model.architectures.checks import (
    MOVING,
    SHORT_FORMS,
    by_kind,
    equals_reference,
    equals_transformers,
    refuses,
)

ROTARY = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "minimax",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "zaya",
)
WITHOUT_POSITIONS = ("granitemoehybrid", "jamba", "kimi_linear", "nemotron_h", "zamba", "zamba2")
"""Recurrent layers alone say where a token is."""

kinds = by_kind("qwen3_next", "jamba")


@kinds(*ROTARY, *WITHOUT_POSITIONS)
def test_the_default_equals_transformers(kind: str) -> None:
    equals_transformers(tiny_model(kind))


@kinds(*ROTARY)
def test_encodings_equal_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    equals_reference(tiny_model(kind), SHORT_FORMS, monkeypatch)


@kinds(*WITHOUT_POSITIONS)
def test_without_rotation_masks_biases_and_temperatures_apply(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    equals_reference(model, ("streaming", "alibi"), monkeypatch)
    refuses(model, ("self_extend", "yarn"), "trained without rotary embeddings")


@kinds("granitemoehybrid", "zamba2")
def test_rotation_that_a_configuration_switches_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = {"granitemoehybrid": {"position_embedding_type": "rope"}, "zamba2": {"use_mem_rope": True}}[kind]
    model = tiny_model(kind, **switch)
    equals_transformers(model)
    equals_reference(model, ("self_extend", "yarn"), monkeypatch)


@kinds("qwen3_next", "granitemoehybrid", "zamba")
def test_the_echo_counts_layers_that_attend(kind: str) -> None:
    model = tiny_model(kind)
    with patched(model) as patch:
        assert set(patch.roles.values()) == {"slots"}
        assert len(patch.roles) < model.config.num_hidden_layers


@kinds("qwen3_next", "jamba")
@torch.no_grad()
def test_a_cache_with_recurrent_states(kind: str) -> None:
    """Token by token from transformers' own cache: what one pass gives, also where keys are evicted."""
    model, tokens = tiny_model(kind), tiny_tokens(1, 30)
    with patched(model) as patch:
        for name in MOVING if patch.geometry.rotates else ("streaming", "alibi"):
            slot = slot_of(patch, SHORT_FORMS[name], 30)
            expected, cache, steps = logits_of(model, tokens, slot), DynamicCache(config=model.config), []
            for low, high in [(0, 20), *((at, at + 1) for at in range(20, 30))]:
                position_ids = encode(torch.arange(low, high)[None], slot)
                steps.append(model(tokens[:, low:high], position_ids=position_ids, cache=cache).logits)
                patch.evict(cache, slot)
            assert relative(torch.cat(steps, 1), expected) < 3e-5, name
