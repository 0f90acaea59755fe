"""Models whose own positions are a bias, a learned table or sinusoids: native, extended, and left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patches import UnsupportedModel, parse, patched
from service.engine.verification import verify
from tests.field import configurations
from tests.models import TRAINED_LENGTH, tiny_model, tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of
from tests.patches.model.architectures.checks import equals_transformers
from tests.patches.model.architectures.test_other_families import REQUESTS, model_of, unpatched
from tests.patches.model.test_patched import same, state_of

# NoPE

FULL = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "fields"), [("afmoe", FULL), ("cohere2", FULL), ("exaone4", FULL), ("smollm3", {"no_rope_layers": [0, 0]})]
)
def test_a_configuration_without_rotation_has_no_positions(kind: str, fields: dict[str, Any]) -> None:
    model, tokens = configurations.tiny_model(kind, **fields), tiny_tokens(1, 40)
    expected = unpatched(model, tokens)
    with patched(model) as patch:
        assert patch.geometry.family == "none"
        assert torch.equal(logits_of(model, tokens), expected)
        assert verify(patch).kind == "paged"


# ALiBi


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon_rw"])
def test_dynamic_slopes_are_the_static_ones_of_the_reserved_length(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(1, 2 * TRAINED_LENGTH)
    with patched(model) as patch:
        own = {} if name != "falcon_rw" else {"bias_dtype": "bfloat16", "scaled": True}
        static = slot_of(patch, {"method": "alibi", "slope_factor": 2.0, **own}, 10)
        dynamic = slot_of(patch, {"method": "alibi", "slope_factor": "dynamic", **own}, 2 * TRAINED_LENGTH)
        assert static == dynamic, "equal numbers share a slot"
        short = slot_of(patch, {"method": "alibi", "slope_factor": "dynamic", **own}, TRAINED_LENGTH)
        assert short == 0, "within the trained length it is the checkpoint's own encoding"
        assert relative(logits_of(model, tokens, static), logits_of(model, tokens)) > 0.01


def test_bloom_extended_is_bloom_with_smaller_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own model, its slopes divided, against the request that asks for it."""
    model, tokens = model_of("bloom"), tiny_tokens(1, 3 * TRAINED_LENGTH)
    with patched(model) as patch:
        result = logits_of(model, tokens, slot_of(patch, {"method": "alibi", "slope_factor": 3.0}, 10))
    from transformers.models.bloom import modeling_bloom

    slopes = modeling_bloom._get_alibi_slopes
    monkeypatch.setattr(modeling_bloom, "_get_alibi_slopes", lambda *args: slopes(*args) / 3.0)
    assert relative(result, unpatched(model, tokens)) < 1e-5


def test_mpt_takes_its_own_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 ignores ``alibi_bias_max``; with it in effect there, the two are equal again."""
    model, tokens = model_of("mpt", attn_config={"alibi_bias_max": 16}), tiny_tokens(1, TRAINED_LENGTH)
    with patched(model) as patch:
        assert patch.describe(parse({"method": "default"}), 10)["alibi_bias_max"] == 16.0
        result = logits_of(model, tokens)
    assert relative(result, unpatched(model, tokens)) > 0.01
    kind: Any = type(model.transformer)
    build = kind.build_mpt_alibi_tensor
    monkeypatch.setattr(
        kind,
        "build_mpt_alibi_tensor",
        lambda self, heads, length, alibi_bias_max=8, device=None: build(self, heads, length, 16, device),
    )
    assert relative(result, unpatched(model, tokens)) < 1e-6


def test_mpt_without_alibi_is_refused() -> None:
    model = model_of("mpt", attn_config={"alibi": False})
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match="no positional encoding"), patched(model):
        raise AssertionError("never entered")
    assert same(before, state_of(model))


def test_falcon_rw_in_the_open_counts_its_bias_twice_in_transformers() -> None:
    """SDPA is the reference: in 5.24 the eager path adds the bias to scores and to the mask. When this
    fails, it is mended there, and eager can be compared with as well."""
    eager, sdpa = (tiny_model("falcon_rw", attn_implementation=name)[1] for name in ("eager", "sdpa"))
    tokens = tiny_tokens(1, TRAINED_LENGTH)
    assert relative(unpatched(eager, tokens), unpatched(sdpa, tokens)) > 0.01


# Learned tables and sinusoids


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_past_the_table_is_refused_and_extended_on_request(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(1, 2 * TRAINED_LENGTH)
    with patched(model) as patch:
        for fields in ({"method": "default"}, {"method": "learned"}):
            assert slot_of(patch, fields, TRAINED_LENGTH) == 0
            with pytest.raises(ValueError, match=rf"has {TRAINED_LENGTH} positions.* {TRAINED_LENGTH + 1} reserved"):
                slot_of(patch, fields, TRAINED_LENGTH + 1)
        for fields in REQUESTS["learned"]:
            result = logits_of(model, tokens, slot_of(patch, fields, 2 * TRAINED_LENGTH))
            assert result.isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_interpolation_is_the_model_with_an_interpolated_table(name: str) -> None:
    """Image models resize their tables; the same model with a table resized by torch."""
    model, tokens = model_of(name), tiny_tokens(2, 2 * TRAINED_LENGTH)
    with patched(model) as patch:
        slot = slot_of(patch, {"method": "learned_interpolation", "align": "ends"}, 2 * TRAINED_LENGTH)
        result = logits_of(model, tokens, slot)
        embedding = patch.embedding
    assert embedding is not None
    wide = model_of(name, max_position_embeddings=2 * TRAINED_LENGTH)
    table = embedding.module.weight
    assert isinstance(table, torch.Tensor)
    offset = len(table) - TRAINED_LENGTH
    resized = torch.nn.functional.interpolate(
        table[offset:].T[None], size=2 * TRAINED_LENGTH, mode="linear", align_corners=True
    )[0].T
    weights = {
        key: torch.cat((table[:offset], resized)) if value is table or torch.equal(value, table) else value
        for key, value in model.state_dict().items()
    }
    wide.load_state_dict(weights)
    assert relative(result, unpatched(wide, tokens)) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "opt", "xglm"])
@torch.no_grad()
def test_no_positions_is_the_model_without_its_table(name: str) -> None:
    model, tokens = model_of(name), tiny_tokens(1, 90)
    with patched(model) as patch:
        result = logits_of(model, tokens, slot_of(patch, {"method": "none"}, 90))
        bare = logits_of(model, tokens[:, 40:60], slot_of(patch, {"method": "none"}, 20))
        embedding = patch.embedding
    assert embedding is not None
    for tensor in [*embedding.module.parameters(), *embedding.module.buffers()]:
        tensor.zero_()
    assert relative(bare, unpatched(model, tokens[:, 40:60])) < 1e-6
    assert result.isfinite().all()


def test_xglm_past_its_table_is_the_formula_in_both() -> None:
    model, twin = model_of("xglm"), model_of("xglm")
    tokens = tiny_tokens(1, 3 * TRAINED_LENGTH)
    expected = unpatched(twin, tokens)
    before = state_of(model)
    with patched(model):
        assert relative(logits_of(model, tokens), expected) < 1e-6
    assert same(before, state_of(model)), "its table did not grow"


def test_gpt_bigcode_has_the_table_of_gpt2() -> None:
    model = configurations.tiny_model("gpt_bigcode")
    equals_transformers(model)
    with patched(model) as patch:
        assert patch.geometry.native == parse({"method": "learned"})
        assert patch.geometry.table_rows == configurations.TRAINED_LENGTH
