"""Layers that add learned logits of distances to their scores, computed from the tokens (Inkling)."""

from __future__ import annotations

import pytest
import torch

from patches import AttentionMass, patched
from tests.field.configurations import WINDOW, tiny_model
from tests.methods import Fields
from tests.models import tiny_tokens
from tests.patches.forward import left_padded, logits_of, relative, slot_of
from tests.patches.model.architectures.checks import (
    SHORT_FORMS,
    TOLERANCE,
    by_kind,
    equals_reference,
    equals_transformers,
    refuses,
)

kinds = by_kind("inkling2_text")
TYPES = ("inkling_text", "inkling2_text")
FLOOR = {"log_scaling_n_floor": 20}
"""Tokens after which scores grow with the position."""

WINDOWS: Fields = {"method": "streaming", "sink_tokens": 2, "window": 9, "absolute_positions": True}


@kinds(*TYPES)
def test_encodings_without_rotation_apply(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind, **FLOOR)
    monkeypatch.setitem(SHORT_FORMS, "windows", WINDOWS)
    monkeypatch.setitem(SHORT_FORMS, "warm", {"method": "none", "attention_temperature": 1.5})
    equals_transformers(tiny_model(kind))
    equals_reference(model, ["alibi", "windows", "warm"], monkeypatch)
    refuses(model, ["yarn", "self_extend"], "trained without rotary")


@torch.no_grad()
@kinds(*TYPES)
def test_the_scale_follows_positions_and_not_padding(kind: str) -> None:
    model, rows = tiny_model(kind, **FLOOR), [tiny_tokens(1, length, seed=length)[0] for length in (40, 17)]
    expected = [model(row[None], use_cache=False).logits[0] for row in rows]
    ids, mask, position_ids = left_padded(rows)
    with patched(model):
        found = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        for number, row in enumerate(rows):
            assert relative(model(row[None], use_cache=False).logits[0], expected[number]) < TOLERANCE
            assert relative(found[number, mask[number].bool()], expected[number]) < TOLERANCE
    again = [model(row[None], use_cache=False).logits[0] for row in rows]
    assert all(torch.equal(*pair) for pair in zip(again, expected, strict=True)), "the model is as it was"


@kinds(*TYPES)
def test_temperatures_multiply_learned_logits(kind: str) -> None:
    """Keys and queries of zero leave the learned logits alone in the scores."""
    model, tokens = tiny_model(kind), tiny_tokens(1, WINDOW)
    with torch.no_grad():
        for layer in model.model.layers:
            next(layer.self_attn.q_proj.parameters()).zero_()
    with patched(model) as patch:
        warm = slot_of(patch, {"method": "none", "attention_temperature": 2.0}, WINDOW)
        assert relative(logits_of(model, tokens, warm), logits_of(model, tokens)) > 1e-3


@torch.no_grad()
@kinds("inkling2_text")
def test_weights_beside_sinks_are_observed(kind: str) -> None:
    with patched(tiny_model(kind)) as patch:
        mass = AttentionMass(16, 24)
        with patch.observing(mass.observe):
            patch.model(tiny_tokens(1, 24), use_cache=False)
    shares = mass.mass().sum(-1)
    assert (shares > 0.1).all()
    assert (shares < 1.0).all()
