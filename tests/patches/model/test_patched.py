"""The patch itself: nothing is left behind, nothing leaks between models, and what cannot be carried is refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

import patches.model.attention.segment_attention
from patches import InvalidEncoding, UnsupportedModel, encode, ignored_entries, patched, runs_triton
from patches.attention import reference
from tests.field import configurations
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
        model(tiny_tokens(1, 4), position_ids=torch.tensor([[0, 0, 0, 0]]))
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


# Refused

SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "CodeGen: its attention": (
        lambda: transformers.CodeGenConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8),
        "does not dispatch by name",
    ),
    "GPT-Neo: learned positions, its attention": (
        lambda: transformers.GPTNeoConfig(**SIZES, num_layers=2, attention_types=[[["global"], 2]]),
        "does not dispatch by name",
    ),
    "BioGPT: learned positions without an entry": (
        lambda: transformers.BioGptConfig(**SIZES, intermediate_size=96),
        "adds positions to its tokens",
    ),
    "Mamba: recurrent layers only": (
        lambda: transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=16),
        "none of its layers attends",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_reason(name: str) -> None:
    config, reason = UNSUPPORTED[name]
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32).eval()
    before, tokens = state_of(model), tiny_tokens(1, 8)
    expected = logits_of_unpatched(model, tokens)
    with pytest.raises(UnsupportedModel, match=reason), patched(model):
        raise AssertionError("never entered")
    assert same(before, state_of(model))
    assert torch.equal(logits_of_unpatched(model, tokens), expected)


def test_a_native_encoding_that_we_do_not_have_is_refused() -> None:
    model = native_model("default")
    model.config.rope_parameters["rope_type"] = "axial"
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match="axial"), patched(model):
        raise AssertionError("never entered")
    assert same(before, state_of(model))


STRAY: list[tuple[str, dict[str, Any]]] = [
    ("yarn", {"finetuned": True, "extrapolation_factor": 1.0, "attn_factor": 1.0}),
    ("yarn", {"type": "linear", "method": "ntk", "attention_temperature": 2.0}),
    ("linear", {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 2.0}),
    ("default", {"factor": 4.0, "anything": [1, 2]}),
    ("dynamic", {"finetuned": True, "type": "ntk"}),
    ("longrope", {"finetuned": True, "type": "su"}),
]


@pytest.mark.parametrize(("name", "entries"), STRAY, ids=str)
def test_entries_that_a_checkpoint_does_not_read_are_ignored(name: str, entries: dict[str, Any]) -> None:
    plain, model = native_model(name), native_model(name)
    model.config.rope_parameters |= entries
    with patched(plain) as own, patched(model) as patch:
        assert (ignored_entries(plain), ignored_entries(model)) == ([], sorted(entries))
        assert patch.geometry == own.geometry
        if "method" not in entries:
            with pytest.raises(InvalidEncoding):
                patch.encoding(model.config.rope_parameters)


def test_entries_that_a_checkpoint_reads_are_not_ignored() -> None:
    """Frequencies are compared, so an entry that changes them is found."""
    model = native_model("yarn")
    model.config.rope_parameters["extrapolation_factor"] = 2.0
    model.get_buffer("model.rotary_emb.inv_freq").mul_(0.5)
    with pytest.raises(UnsupportedModel, match="its rotary module rotates by frequencies"), patched(model):
        raise AssertionError("never entered")


@pytest.mark.parametrize(("name", "entry"), [("dynamic", "alpha"), ("longrope", "long_mscale")])
def test_entries_that_scale_are_refused_where_frequencies_follow_the_length(name: str, entry: str) -> None:
    model = native_model(name)
    model.config.rope_parameters[entry] = 2.0
    with pytest.raises(UnsupportedModel, match=f"is not one we carry: {entry}"), patched(model):
        raise AssertionError("never entered")


def test_an_unknown_pair_layout_keeps_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model turns by the tables that it is given; attention itself cannot turn its states."""
    model = native_model("default")
    module = sys.modules[type(model).__module__]
    original = module.apply_rotary_pos_emb
    turned = lambda query, key, cos, sin: [part.roll(1, -1) for part in original(query, key, cos, sin)]  # noqa: E731
    monkeypatch.setattr(module, "apply_rotary_pos_emb", turned)
    tokens = tiny_tokens(1, 40)
    expected, scaled = (logits_of_unpatched(one, tokens) for one in (model, native_model("linear")))
    with patched(model) as patch:
        assert torch.equal(logits_of(model, tokens), expected)
        assert relative(logits_of(model, tokens, slot_of(patch, LINEAR, 40)), scaled) < 1e-5
        with pytest.raises(ValueError, match="only encodings that keep the positions"):
            slot_of(patch, {"method": "self_extend"}, 40)


def test_attention_with_a_term_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("default")
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = original(self, hidden_states, *args, **kwargs)
        return output * (2.0 if self.config._attn_implementation == "sdpa" else 1.0), weights

    monkeypatch.setattr(attention, "forward", forward)
    before = state_of(model)
    with pytest.raises(UnsupportedModel, match="the patched logits differ by"), patched(model):
        raise AssertionError("never entered")
    assert same(before, state_of(model))


def test_a_rotation_that_is_not_found_is_refused() -> None:
    """Without a rotary module a model would pass for one without positions."""
    model = native_model("default")
    rotary = model.model.rotary_emb
    rotary.frequencies = rotary.inv_freq.clone()
    rotary.forward = lambda x, position_ids: tuple(
        table(torch.cat([position_ids[..., None] * rotary.frequencies] * 2, -1)) for table in (torch.cos, torch.sin)
    )
    del rotary.inv_freq, rotary.original_inv_freq
    with pytest.raises(UnsupportedModel, match="rotate in a way that we do not know"), patched(model):
        raise AssertionError("never entered")


def test_layers_that_ignore_their_table_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("default")
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda query, key, cos, sin: (query, key))
    with pytest.raises(UnsupportedModel, match="none of its 2 layers rotates"), patched(model):
        raise AssertionError("never entered")


def test_frequencies_that_the_configuration_does_not_say_are_refused() -> None:
    model = native_model("default")
    module = next(module for module in model.modules() if "inv_freq" in module._buffers)
    module.inv_freq *= torch.linspace(1.0, 1.01, len(module.inv_freq))
    with pytest.raises(UnsupportedModel, match="its rotary module rotates by frequencies down to"), patched(model):
        raise AssertionError("never entered")


def test_an_odd_number_of_rotated_dimensions_is_refused() -> None:
    """MiMo-V2 rounds 0.334 of a head down; 5 of 16 dimensions give frequencies for 5 and a rotation of 6."""
    model = configurations.tiny_model("mimo_v2_flash", head_dim=16)
    with pytest.raises(UnsupportedModel, match="frequencies"), patched(model):
        raise AssertionError("never entered")


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
