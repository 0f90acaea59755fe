"""Layers that choose their keys by an indexer, or add their numbers to scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from patches import AttentionMass, Patched, UnsupportedModel, patched
from patches.attention import fused
from patches.attention.layer import Layer
from patches.model.measuring.trial import Trial
from patches.model.rotary_tables import RotaryTables
from tests.field.configurations import tiny_model
from tests.methods import Fields, rows
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

kinds = by_kind("deepseek_v32", "doge")
TYPES = (
    "axk2",
    "deepseek_v32",
    "doge",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "minimax_m3_vl_text",
    "qwen4_exp_text",
)
INDEXED = tuple(kind for kind in TYPES if kind != "doge")
"""Types whose layers choose by an indexer, which rotates."""
STILL = ("none", "alibi")
"""Requests that rotate nothing."""
SIZES: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 3,
    }
}


@kinds(*TYPES)
def test_encodings_that_keep_positions_apply(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind, **SIZES.get(kind, {}))
    equals_transformers(model)
    still = STILL if kind in INDEXED else ()
    equals_reference(model, [name for name in SHORT_FORMS if name not in (*MOVING, *still)], monkeypatch)
    refuses(model, MOVING, "its layers choose among keys")
    refuses(model, still, "only encodings that rotate apply to this model: its layers choose keys by other rotated")


@kinds(*TYPES)
def test_the_last_token_sees_fewer_keys_than_there_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doge adds numbers to the scores of all keys; every other type chooses among them here."""
    seen: list[torch.Tensor] = []
    original = fused.attend

    def attend(*states: Any, **others: Any) -> torch.Tensor:
        layer: Layer = states[5]
        if layer.bias is not None:
            seen.append(layer.bias[0, 0, -1])
        return original(*states, **others)

    monkeypatch.setattr(fused, "attend", attend)
    model = tiny_model(kind, **SIZES.get(kind, {}))
    with patched(model):
        logits_of(model, tiny_tokens(1, 32))
    biases = [bias for bias in seen if len(bias) == 32]
    assert biases
    assert all(int((bias == 0.0).sum()) < 32 for bias in biases)


@kinds(*INDEXED)
def test_later_text_changes_no_earlier_logits(kind: str) -> None:
    """Few different tokens give many keys one score where nothing rotates. Every method is tried."""
    model = tiny_model(kind, **SIZES.get(kind, {}))
    tokens = tiny_tokens(1, 48) % 6 + 3
    with patched(model) as patch:
        geometry = patch.geometry
        pairs, trained = geometry.rotary_dim // 2, geometry.original_max_position_embeddings
        table = rows(pairs, trained, geometry.num_attention_heads)
        taken = [slot for row in table for slot in slots_of(patch, row.requests[-1])]
        for slot in taken:
            whole, early = (logits_of(model, tokens[:, :length], slot) for length in (48, 29))
            assert relative(early, whole[:, :29]) < 1e-5, patch.slots[slot]
    assert len(taken) > 10


def slots_of(patch: Patched, fields: Fields) -> list[int]:
    """The slot of a request; none where the model refuses it."""
    try:
        return [slot_of(patch, fields, 48)]
    except ValueError:
        return []


@kinds("deepseek_v32")
def test_windows_and_the_choice_of_keys_exclude_together(kind: str) -> None:
    model, tokens = tiny_model(kind, **SIZES.get(kind, {})), tiny_tokens(2, 32)
    fields = {"method": "streaming", "sink_tokens": 0, "window": 3, "absolute_positions": True}
    with patched(model) as patch:
        logits = logits_of(model, tokens, slot_of(patch, fields, 32))
        assert logits.isfinite().all()
        late = tokens.clone()
        late[:, -1] = 5
        changed = logits_of(model, late, slot_of(patch, fields, 32))
        assert torch.equal(changed[:, :-1], logits[:, :-1]), "no token sees a later one"
        assert relative(changed[:, -1], logits[:, -1]) > 0.01


@kinds("deepseek_v32")
@torch.no_grad()
def test_the_weights_of_chosen_keys_are_observed(kind: str) -> None:
    model, tokens = tiny_model(kind), tiny_tokens(1, 24)
    with patched(model) as patch:
        mass = AttentionMass(16, 24)
        with patch.observing(mass.observe):
            model(tokens, use_cache=False)
    assert mass.layers == [0, 1]
    assert np.allclose(mass.mass().sum(-1), 1.0)


def test_states_that_ours_does_not_take_are_refused() -> None:
    trial, states = Trial({}, RotaryTables([]), {}), torch.zeros(1, 2, 16, 4)
    with pytest.raises(UnsupportedModel, match="hand decay to their attention"):
        trial.attention(torch.nn.Module(), states, states, states, None, decay=states)
