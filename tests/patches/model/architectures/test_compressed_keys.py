"""Layers that also attend to keys of several tokens, rotated at the first of them (DeepSeek-V4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from patches import AttentionMass, UnsupportedModel, patched
from patches.model.measuring import measurement
from tests.field.configurations import TRAINED_LENGTH, WINDOW, tiny_model
from tests.field.passes import decoded, passed
from tests.methods import Fields
from tests.models import tiny_tokens
from tests.patches.encoding.test_rope_parameters import NATIVE
from tests.patches.forward import logits_of, relative, slot_of
from tests.patches.model.architectures.checks import TOLERANCE, equals_transformers

KIND = "deepseek_v4"
COMPRESSED, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"


def declaring(parameters: dict[str, Any]) -> PreTrainedModel:
    own = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    by_type = {"main": {"rope_type": "default", **own}, "compress": {**own, "rope_theta": 160_000.0, **parameters}}
    return tiny_model(KIND, rope_parameters=by_type)


def requested(parameters: Fields) -> Fields:
    fields = {name: value for name, value in parameters.items() if not name.startswith("original")}
    return {"method": fields.pop("rope_type"), **fields}


def test_the_default_equals_transformers() -> None:
    equals_transformers(tiny_model(KIND))


@pytest.mark.parametrize(
    ("name", "times"),
    [
        pytest.param(name, times, marks=() if (name, times) == ("yarn", 4) else pytest.mark.slow)
        for name in NATIVE
        for times in (1, 4)
    ],
)
def test_requests_equal_transformers_with_the_same_parameters(name: str, times: int) -> None:
    """In one pass and from a cache. The cache computes the keys of several tokens as soon as it has all of these."""
    rows, declared = [tiny_tokens(1, times * TRAINED_LENGTH)[0]], declaring(NATIVE[name])
    expected, plain = passed(declared, rows), declaring({"rope_type": "default"})
    with patched(plain) as patch:
        slots = [slot_of(patch, requested(NATIVE[name]), len(rows[0]))]
        alone, cached = passed(plain, rows, slots), decoded(plain, rows, slots)
        assert relative(passed(plain, rows)[0], expected[0]) > 1e-3, "the scaling must matter"
    assert cached is not None
    assert relative(alone[0], expected[0]) < TOLERANCE
    assert relative(cached[0], expected[0]) < TOLERANCE


def test_a_declared_scaling_is_the_default_and_applies_once() -> None:
    tokens, model = tiny_tokens(1, 2 * TRAINED_LENGTH), declaring(NATIVE["yarn"])
    expected = logits_of(model, tokens)
    with patched(model) as patch:
        assert patch.describe("default", 32)["method"] == "yarn"
        assert relative(logits_of(model, tokens), expected) < TOLERANCE
        again = slot_of(patch, {"method": "yarn", "factor": 4.0}, 32)
        assert relative(logits_of(model, tokens, again), expected) < TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_64_greedy_tokens_are_those_of_its_own_generate() -> None:
    prompt, model = tiny_tokens(1, 30), tiny_model(KIND)
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    expected = model.generate(prompt, **options)  # type: ignore[operator]
    with patched(model):
        assert torch.equal(model.generate(prompt, **options), expected)  # type: ignore[operator]


def test_a_trial_has_as_many_tokens_as_its_keys_cover() -> None:
    model = tiny_model(KIND, compress_rates={SPARSE: 4, COMPRESSED: 128})
    with patched(model) as patch:
        assert patch.roles == {0: "own", 1: "slots", 2: "slots"}
    equals_transformers(model)


def test_keys_of_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MOST_TOKENS", 16)
    with pytest.raises(UnsupportedModel, match="cover more than 16 tokens"), patched(tiny_model(KIND)):
        raise AssertionError("never entered")


def test_only_layers_with_a_window_among_compressed_ones_keep_their_table() -> None:
    layers = {"num_hidden_layers": 2, "layer_types": [COMPRESSED, SPARSE], "mlp_layer_types": ["moe", "moe"]}
    with patched(tiny_model(KIND, **layers)) as patch:
        assert patch.roles == {0: "slots", 1: "slots"}
        assert patch.smallest_window == WINDOW


REFUSED: list[tuple[Fields, str]] = [
    ({"method": "self_extend", "group_size": 4, "neighbor_window": 8}, "keep the positions"),
    ({"method": "streaming", "sink_tokens": 2, "window": 9}, "keep the positions"),
    ({"method": "streaming", "sink_tokens": 0, "window": 9, "absolute_positions": True}, "without windows"),
    ({"method": "alibi"}, "without windows and biases"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_encodings_by_distance_are_refused(fields: Fields, reason: str) -> None:
    with patched(tiny_model(KIND)) as patch, pytest.raises(ValueError, match=reason):
        slot_of(patch, fields, 32)


def test_temperatures_reach_compressed_keys() -> None:
    """All layers but those with a window have compressed keys, and a temperature past the trained length."""
    length, model = 2 * TRAINED_LENGTH, tiny_model(KIND)
    fields: list[Fields] = [{"method": "none"}, {"method": "none", "attention_temperature": "log_n"}]
    with patched(model) as patch:
        plain, warm = (logits_of(model, tiny_tokens(1, length), slot_of(patch, each, length)) for each in fields)
    assert torch.equal(plain[:, :TRAINED_LENGTH], warm[:, :TRAINED_LENGTH])
    assert relative(plain[:, TRAINED_LENGTH:], warm[:, TRAINED_LENGTH:]) > 1e-3


def test_its_attention_is_not_observed() -> None:
    with patched(tiny_model(KIND)) as patch, pytest.raises(ValueError, match="cover several tokens"):
        patch.observing(AttentionMass(0, 8).observe)
