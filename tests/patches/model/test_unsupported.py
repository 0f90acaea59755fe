"""Models that a patch cannot carry are refused with the reason, and left as they were."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from patches import InvalidEncoding, UnsupportedModel, geometry_of, ignored_entries, patched
from patches.encoding.masks import CAUSAL, LayerMask
from patches.model.attention.attention_seam import AttentionSeam
from patches.model.measuring.measurement import CHANGES_LATER
from tests.field import configurations
from tests.models import tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of
from tests.patches.model.test_patched import LINEAR, logits_of_unpatched, native_model, same, state_of

SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "GPT: learned positions, its attention": (
        lambda: transformers.OpenAIGPTConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4),
        "does not dispatch by name",
    ),
    "CTRL: sinusoids in no module of their own": (
        lambda: transformers.CTRLConfig(vocab_size=128, n_embd=64, dff=96, n_layer=2, n_head=4),
        "adds positions to its tokens",
    ),
    "Mamba: recurrent layers only": (
        lambda: transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, state_size=16),
        "none of its layers attends",
    ),
}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"is_causal": False}),
        ("gpt2", {"is_causal": False}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
    ],
)
def test_bidirectional_attention_is_refused(kind: str, fields: dict[str, Any]) -> None:
    model = configurations.tiny_model(kind, **fields)
    with pytest.raises(UnsupportedModel, match="its attention is bidirectional: tokens see later ones"), patched(model):
        raise AssertionError("never entered")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_by_length_are_refused_where_keys_cover_several_tokens(rope_type: str) -> None:
    own = configurations.tiny_config("deepseek_v4").rope_parameters
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    scaling = {"rope_type": rope_type, "factor": 2.0, **(lists if rope_type == "longrope" else {})}
    parameters = {"main": own["main"], "compress": own["compress"] | scaling}
    model = configurations.tiny_model("deepseek_v4", rope_parameters=parameters)
    with pytest.raises(UnsupportedModel, match="its frequencies follow the length, and keys"), patched(model):
        raise AssertionError("never entered")


def test_another_scaling_of_phimoe_is_refused() -> None:
    scaling = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    model = configurations.tiny_model("phimoe", rope_parameters={**scaling, "short_mscale": 1.2, "long_mscale": 1.3})
    with pytest.raises(UnsupportedModel, match=r"its native encoding .* is not one we carry: .*short_mscale"):
        patched(model).__enter__()


def test_layers_that_get_no_states_by_token_are_refused() -> None:
    model = configurations.tiny_model("jamba")
    model.model.layers = torch.nn.Sequential(*model.model.layers)  # no list whose layers we could watch
    with pytest.raises(UnsupportedModel, match="enter its layers, so its positions"), patched(model):
        raise AssertionError("never entered")


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_position_embeddings": None}, "does not say for how many tokens"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_parameters for its rotary module"),
        ({"num_attention_heads": None}, "none of its layers attends"),
    ],
)
def test_a_configuration_that_lacks_a_fact_is_refused(change: dict[str, Any], reason: str) -> None:
    model = native_model("default")
    vars(model.config).update(change)
    with pytest.raises(UnsupportedModel, match=reason):
        geometry_of(model)


def test_a_model_without_a_configuration_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="carries no configuration"):
        geometry_of(torch.nn.Linear(2, 2))


def test_a_rotary_table_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("default")
    rotary = model.model.rotary_emb
    own, before = rotary.forward, state_of(model)
    monkeypatch.setattr(rotary, "forward", lambda *given, **named: [part.flip(-2) for part in own(*given, **named)])
    with pytest.raises(UnsupportedModel, match="in no layout that we know"), patched(model):
        raise AssertionError("never entered")
    monkeypatch.undo()
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


def test_keys_of_zero_are_refused() -> None:
    """Zaya multiplies its keys by parameters that begin at zero."""
    model = AutoModelForCausalLM.from_config(configurations.tiny_config("zaya"), dtype=torch.float32).eval()
    with pytest.raises(UnsupportedModel, match="all keys of its layer 0 are zero, so that no measurement"):
        patched(model).__enter__()


def test_keys_that_do_not_rotate_keep_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = native_model("default")
    module = sys.modules[type(model).__module__]
    original = module.apply_rotary_pos_emb
    monkeypatch.setattr(
        module, "apply_rotary_pos_emb", lambda query, key, *table: (original(query, key, *table)[0], key)
    )
    with patched(model) as patch:
        assert patch.geometry.keeps_positions == CHANGES_LATER


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


@pytest.mark.parametrize(
    ("kind", "fields"), [("mistral", {}), ("llama4_text", {}), ("gemma2", {}), ("mixtral", {"sliding_window": 24})]
)
def test_another_window_than_that_of_the_layers_is_refused(
    kind: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the start goes past windows and chunks of few tokens."""
    original = AttentionSeam.layer_mask

    def larger(self: AttentionSeam, index: int, sliding_window: int | None = None) -> LayerMask:
        mask = original(self, index, sliding_window)
        return CAUSAL if mask != CAUSAL else mask

    monkeypatch.setattr(AttentionSeam, "layer_mask", larger)
    model = configurations.tiny_model(kind, **fields)
    with pytest.raises(UnsupportedModel, match="the patched logits differ by"), patched(model):
        raise AssertionError("never entered")
