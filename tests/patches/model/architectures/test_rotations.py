"""Rotations that differ from Llama's: by layer type, by several modules, in the other sense, before a norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from patches import InvalidEncoding, UnsupportedModel, patched
from patches.rope_parameters import rope_parameters
from tests.field.configurations import VARIANTS, tiny_model
from tests.models import tiny_tokens
from tests.patches.forward import relative
from tests.patches.model.architectures.checks import (
    LENGTH,
    MOVING,
    SHORT_FORMS,
    TOLERANCE,
    by_kind,
    equals_reference,
    equals_transformers,
    refuses,
)

kinds = by_kind("granite_swa", "hunyuan_v1_dense", "mistral_large4")
CARRIED = (
    "beam",  # rotates in layers with a window only
    "gemma4_text",  # heads of two sizes
    "granite_swa",  # one rotary module per base
    "granitemoe_swa",
    "nanochat",  # turns the other way
)
ALPHA = {
    **{"rope_type": "dynamic", "type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0, "alpha": 1000.0},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0},
}
"""Of HunYuan's published files."""
KEEPS_POSITIONS = [name for name in SHORT_FORMS if name not in MOVING]


@kinds(*CARRIED)
def test_every_encoding_applies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    equals_transformers(model)
    equals_reference(model, SHORT_FORMS, monkeypatch)


@pytest.mark.slow
def test_layers_that_share_keys_compute_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes the last queries only in these layers of Gemma 4, when `generate` asks for the last."""
    model_type, fields = VARIANTS["gemma4_text (shared keys)"]
    model = tiny_model(model_type, **fields)
    equals_transformers(model)
    equals_reference(model, SHORT_FORMS, monkeypatch)


@kinds("granite_swa")
def test_layers_by_another_module_keep_their_frequencies(kind: str) -> None:
    bases = {"layer_rope_theta": [10_000.0, 500.0], "layer_types": ["full_attention", "sliding_attention"]}
    model = tiny_model(kind, num_hidden_layers=2, **bases)
    equals_transformers(model)
    with patched(model) as patch:
        assert patch.roles == {0: "slots", 1: "own"}
        assert patch.geometry.rope_theta == 10_000.0


@kinds("granite_swa")
def test_two_bases_without_a_window_are_refused(kind: str) -> None:
    bases = {"layer_rope_theta": [10_000.0, 500.0], "layer_types": ["full_attention"] * 2}
    model = tiny_model(kind, num_hidden_layers=2, **bases)
    with pytest.raises(UnsupportedModel, match="2 different tables"), patched(model):
        raise AssertionError("never entered")


@kinds("nanochat")
def test_the_sense_of_rotation_is_measured(kind: str) -> None:
    with patched(tiny_model(kind)) as patch:
        assert patch.geometry.reverses


@kinds("hunyuan_v1_dense", "hunyuan_v1_moe")
def test_a_norm_after_the_rotation_keeps_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    equals_transformers(model)
    equals_reference(model, KEEPS_POSITIONS, monkeypatch)
    refuses(model, MOVING, "its layers change them after they rotate them")


@kinds("hunyuan_v1_dense", "hunyuan_v1_moe")
def test_dynamic_with_an_alpha_is_one_larger_base(kind: str) -> None:
    model = tiny_model(kind, rope_parameters=dict(ALPHA))
    equals_transformers(model)
    own = model.get_buffer("model.rotary_emb.inv_freq").tolist()
    assert own[-1] < 1e-3 * tiny_model(kind).get_buffer("model.rotary_emb.inv_freq").tolist()[-1] * 1.01
    with patched(model) as patch:
        for length in (patch.geometry.original_max_position_embeddings, 5000):
            assert patch.resolve("default", length).inv_freq == pytest.approx(own, rel=3e-7)
            assert patch.resolve(ALPHA, length).inv_freq == patch.resolve("default", length).inv_freq
        with pytest.raises(InvalidEncoding, match="alpha"):
            patch.encoding({**ALPHA, "factor": 2.0})


@kinds("ernie4_5_vl_moe")
def test_another_order_of_the_frequencies_is_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(kind)
    equals_transformers(model)
    equals_reference(model, SHORT_FORMS, monkeypatch)
    kept = model.get_buffer("model.language_model.rotary_emb.inv_freq").tolist()
    with patched(model) as patch:
        assert patch.geometry.interleaved
        assert list(patch.resolve("default", LENGTH).inv_freq) == sorted(kept, reverse=True) != kept


LEARNED = "model.language_model.rotary_emb.alpha"


def scaled(model: PreTrainedModel, parameters: dict[str, Any]) -> PreTrainedModel:
    """A model with the same weights under other ``rope_parameters``."""
    config = copy.deepcopy(model.config)
    config.get_text_config().rope_parameters = parameters
    other: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    return other.eval()


@kinds("mistral_large4")
@pytest.mark.parametrize("fields", ["linear:4", "ntk:2", {"method": "custom", "inv_freq": [0.9, 0.1, 0.02, 0.0]}])
def test_learned_factors_multiply_frequencies_as_in_transformers(kind: str, fields: Any) -> None:
    model = tiny_model(kind)
    equals_transformers(model)
    learned = model.get_parameter(LEARNED).exp()
    assert (learned - 1).abs().min() > 0.05
    tokens = tiny_tokens(2, LENGTH)
    with patched(model) as patch, torch.no_grad():
        assert patch.layers == {"slots": 2, "never": 1, "tempered": 3}
        resolved = patch.resolve(fields, LENGTH)
        written = rope_parameters(resolved, patch.geometry, LENGTH)
        logits = model(tokens, **patch.encoding(fields, LENGTH)).logits
    if isinstance(fields, dict):
        assert resolved.inv_freq == tuple(torch.tensor(fields["inv_freq"]).tolist())
    for parameters in written:
        with torch.no_grad():
            assert relative(scaled(model, parameters)(tokens).logits, logits) < TOLERANCE


@kinds("mistral_large4")
def test_learned_factors_come_before_whole_wavelengths(kind: str) -> None:
    with patched(tiny_model(kind)) as patch:
        found = torch.tensor(patch.resolve("resonance:base=linear:2", LENGTH).inv_freq, dtype=torch.float64)
        scaled = torch.tensor(patch.resolve("linear:2", LENGTH).inv_freq, dtype=torch.float64)
    torch.testing.assert_close(2 * torch.pi / found, (2 * torch.pi / scaled).round(), rtol=1e-6, atol=0.0)
