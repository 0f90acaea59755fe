"""The patch itself: nothing is left behind, nothing leaks between models, and training goes through it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import patches.model.attention.segment_attention
from patches import encode, patched, runs_triton
from patches.attention import reference
from tests.models import TRAINED_LENGTH, tiny_model, tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
NATIVE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "yarn": YARN,
    "linear": LINEAR,
    # These two rewrite their own buffers whenever they run.
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH, **LISTS},
}


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a patch could leave behind: attributes, hooks, weights, buffers, names, configuration."""
    state: dict[str, Any] = {
        "config": {name: repr(value) for name, value in vars(model.config).items()},
        "attention names": sorted(AttentionInterface._global_mapping),
        "mask names": sorted(AttentionMaskInterface._global_mapping),
        "tensors": {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]},
    }
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
        state[name] = {key: value.clone() if torch.is_tensor(value) else repr(value) for key, value in plain.items()}
    return state


def same(left: Any, right: Any) -> bool:
    if torch.is_tensor(left):
        return torch.is_tensor(right) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return bool(left == right)


def native_model(name: str) -> PreTrainedModel:
    model = tiny_model("llama", NATIVE[name], attn_implementation="sdpa")[1]
    logits_of_unpatched(model, tiny_tokens(1, 3 * TRAINED_LENGTH))  # length-dependent ones have grown
    return model


@torch.no_grad()
def logits_of_unpatched(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(tokens).logits
    return result


# Restored


@pytest.mark.parametrize("name", NATIVE)
def test_the_state_itself_sees_a_patch(name: str) -> None:
    model = native_model(name)
    before = state_of(model)
    assert same(before, state_of(model))
    with patched(model):
        inside = state_of(model)
    changed = {part for part in before if not same(before[part], inside[part])}
    hooked = ""  # the model itself, whose forward notes the positions
    fused = {name for name, module in model.named_modules() if type(module).__name__.endswith(("RMSNorm", "MLP"))}
    fused = fused if runs_triton(model.device) else set()
    assert changed == {"config", "attention names", "mask names", "model.rotary_emb", hooked, *fused}


@pytest.mark.parametrize("name", NATIVE)
def test_restored_after_success(name: str) -> None:
    model, tokens = native_model(name), tiny_tokens(2, 2 * TRAINED_LENGTH)
    twin = native_model(name)
    before = state_of(model)
    with patched(model) as patch:
        for fields in ({"method": "self_extend"}, {"method": "dynamic", "factor": 3.0}, {"method": "alibi"}):
            logits_of(model, tokens, slot_of(patch, fields, tokens.shape[1]))
        model.generate(tokens, max_new_tokens=2)
    assert same(before, state_of(model))
    assert torch.equal(logits_of_unpatched(model, tokens), logits_of_unpatched(twin, tokens))


@pytest.mark.parametrize("name", NATIVE)
def test_restored_after_an_exception(name: str) -> None:
    model = native_model(name)
    before = state_of(model)
    with pytest.raises(ZeroDivisionError), patched(model):
        raise ZeroDivisionError
    assert same(before, state_of(model))
    with pytest.raises(ValueError, match="count up by one"), patched(model):
        model(tiny_tokens(1, 4), position_ids=torch.tensor([[0, 2, 4, 6]]))
    assert same(before, state_of(model))


def test_restored_when_entering_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("default")
    before = state_of(model)
    original = model.set_attn_implementation
    calls: list[str] = []

    def fails_at_first(name: str) -> None:
        calls.append(name)
        if len(calls) == 1:
            raise OSError("no kernel")
        original(name)

    monkeypatch.setattr(model, "set_attn_implementation", fails_at_first)
    with pytest.raises(OSError, match="no kernel"), patched(model):
        raise AssertionError("never entered")
    monkeypatch.undo()
    assert same(before, state_of(model))


def test_a_forward_that_another_library_hooked_comes_back() -> None:
    """Dispatching a model over devices replaces ``forward`` on instances, as the patch does."""
    model = native_model("default")
    rotary = model.model.rotary_emb
    rotary.forward = functools.partial(type(rotary).forward, rotary)
    before, hooked = state_of(model), rotary.forward
    with patched(model):
        assert rotary.forward is not hooked
    assert rotary.forward is hooked
    assert same(before, state_of(model))


# Several


def test_two_patched_models_do_not_interfere() -> None:
    tokens = tiny_tokens(2, TRAINED_LENGTH)
    first = tiny_model("llama", attn_implementation="sdpa", seed=1)[1]
    second = tiny_model("llama", YARN, attn_implementation="sdpa", seed=2)[1]
    expected = [logits_of_unpatched(model, tokens) for model in (first, second)]
    extended = {"method": "self_extend", "group_size": 4, "neighbor_window": 16}
    with patched(first) as one:
        slot = slot_of(one, extended, TRAINED_LENGTH)
        alone = logits_of(first, tokens, slot)
        with patched(second) as two:
            assert one.attention_name != two.attention_name
            assert slot_of(two, {"method": "alibi"}, TRAINED_LENGTH) == slot, "the same number, another encoding"
            assert torch.equal(logits_of(second, tokens), expected[1])
            assert torch.equal(logits_of(first, tokens), expected[0])
            assert torch.equal(logits_of(first, tokens, slot), alone)
            assert relative(logits_of(second, tokens, slot), expected[1]) > 0.01
        assert torch.equal(logits_of(first, tokens, slot), alone), "the first survives the end of the second"
        assert torch.equal(logits_of_unpatched(second, tokens), expected[1])
    assert torch.equal(logits_of_unpatched(first, tokens), expected[0])


def test_a_model_is_patched_once() -> None:
    model = native_model("default")
    before, tokens = state_of(model), tiny_tokens(1, 30)
    with patched(model) as patch:
        slot = slot_of(patch, {"method": "linear", "factor": 2.0}, 30)
        result = logits_of(model, tokens, slot)
        with pytest.raises(ValueError, match="patched already"), patched(model):
            raise AssertionError("never entered")
        assert torch.equal(logits_of(model, tokens, slot), result)
    assert same(before, state_of(model))
    with patched(model) as patch:
        assert torch.equal(logits_of(model, tokens, slot_of(patch, {"method": "linear", "factor": 2.0}, 30)), result)


# Training


def gradients(model: PreTrainedModel, tokens: torch.Tensor, slot: int = 0) -> dict[str, torch.Tensor]:
    model.zero_grad()
    position_ids = encode(torch.arange(tokens.shape[1])[None], slot)
    model(tokens, labels=tokens, position_ids=position_ids).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_training_through_the_default_path_is_unpatched_training() -> None:
    model, tokens = native_model("default").train(), tiny_tokens(2, 40)
    expected = gradients(model, tokens)
    with patched(model):
        result = gradients(model, tokens)
    assert len(result) == len(list(model.parameters()))
    assert same(result, expected)


@pytest.mark.parametrize("method", ["alibi", "self_extend", "none"])
def test_gradients_are_those_of_the_reference(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ALiBi model is trained through the patch: kernels must differentiate as the specification does."""
    model, tokens = native_model("default").train(), tiny_tokens(2, 40)
    with patched(model) as patch:
        slot = slot_of(patch, {"method": method}, 40)
        result = gradients(model, tokens, slot)
        monkeypatch.setattr(
            patches.model.attention.segment_attention.fused,
            "attend",
            lambda q, k, v, how, _, layer, q_start, num_sinks: reference.attend(q, k, v, how, layer, q_start=q_start),
        )
        expected = gradients(model, tokens, slot)
    assert len(result) == len(list(model.parameters()))
    for name, gradient in result.items():
        assert gradient.abs().max() > 0, name
        assert relative(gradient, expected[name]) < 1e-4, name
