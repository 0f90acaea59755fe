"""The language model inside of a multimodal one: text alone, with the sections of its positions (M-RoPE)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from patches import UnsupportedModel, patched
from tests import architectures
from tests.field.configurations import shrunk, tiny_model
from tests.models import randomise, tiny_tokens
from tests.patches.forward import logits_of
from tests.patches.model.architectures.checks import SHORT_FORMS, by_kind, equals_reference, equals_transformers
from tests.patches.model.test_patched import logits_of_unpatched, same, state_of

SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
SPECIAL = {"image_token_id": 126, "video_token_id": 127, "vision_start_token_id": 125, "image_token_index": 126}
TYPES = (
    *("gemma3", "gemma4", "gemma4_unified", "glm5_next", "got_ocr2", "internvl", "lfm2_vl", "mistral3"),
    *("qwen2_5_vl", "qwen3_5", "qwen3_vl"),
)
WITHOUT_POSITIONS, STILL = ("glm5_next",), ("streaming", "alibi")
"""Types that rotate nothing, and the encodings that apply to them."""

kinds = by_kind("glm5_next", "qwen2_5_vl", "mistral3")


def wrapper(kind: str, **scaling: Any) -> PreTrainedModel:
    config: Any = shrunk(CONFIG_MAPPING[kind]())
    if kind.startswith("qwen"):
        config.text_config.rope_parameters |= SECTIONS | scaling
    for name in SPECIAL:
        if hasattr(config, name):
            setattr(config, name, SPECIAL[name])
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    return model.eval()


@kinds(*TYPES)
def test_text_is_carried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapper(kind)
    equals_transformers(model)
    before = state_of(model)
    equals_reference(model, STILL if kind in WITHOUT_POSITIONS else SHORT_FORMS, monkeypatch)
    assert same(before, state_of(model))


def test_parts_beside_the_text_keep_their_attention() -> None:
    """transformers gives the attention of the whole to VibeVoice's encoder, which has none that SDPA could replace."""
    config: Any = shrunk(CONFIG_MAPPING["vibevoice"]())
    config.audio_config.num_filters = config.semantic_model_config.num_filters = 1
    torch.manual_seed(0)
    model = transformers.VibeVoiceForConditionalGeneration(config).float().eval()
    randomise(model, 0)
    parts = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    before, tokens = [part._attn_implementation for part in parts], tiny_tokens(1, 40)
    expected = logits_of_unpatched(model, tokens)
    with patched(model):
        assert torch.equal(logits_of(model, tokens), expected)
    assert [part._attn_implementation for part in parts] == before


def test_the_page_names_the_types() -> None:
    named = architectures.NOTES.partition("`AutoModelForImageTextToText`")[2]
    assert set(re.findall("`([a-z0-9_]+)`", named)) == set(TYPES)


@kinds("qwen2_5_vl", "qwen3_vl", "qwen3_5")
def test_scaled_text_is_carried(kind: str) -> None:
    model = wrapper(kind, rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mrope_interleaved=True)
    equals_transformers(model)
    with patched(model) as patch:
        own = model.config.get_text_config().rope_parameters
        assert patch.resolve(own, 64).inv_freq == patch.resolve("default", 64).inv_freq


@kinds("mistral3")
def test_parts_for_images_keep_their_attention(kind: str) -> None:
    model = wrapper(kind)
    model.set_attn_implementation({"vision_config": "eager"})
    with patched(model) as patch:
        assert model.config.vision_config._attn_implementation == "eager"
        assert model.config.text_config._attn_implementation == patch.attention_name
    assert model.config.text_config._attn_implementation == model.config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


@kinds("got_ocr2")
def test_a_vision_part_may_attend_without_dispatch(kind: str) -> None:
    model = wrapper(kind)
    with patched(model) as patch:
        assert model.config.text_config._attn_implementation == patch.attention_name
        assert model.config._attn_implementation == "eager"
        with pytest.raises(ValueError, match="patched already"), patched(model):
            raise AssertionError("never entered")
    assert model.config.text_config._attn_implementation == "sdpa"


@kinds("gemma4_unified")
def test_a_plain_mask_that_the_wrapper_insists_on_chooses_no_keys(kind: str) -> None:
    with patched(wrapper(kind)) as patch:
        assert patch.geometry.keeps_positions is None
        assert patch.mask_kind(insists=True, local=False) is None


@kinds("unlimited_ocr")
def test_a_cache_that_keeps_the_first_forward_takes_whole_prompts(kind: str) -> None:
    with patched(wrapper(kind)) as patch:
        assert not patch.continues


@kinds("llama4")
def test_the_whole_fails_in_transformers_itself(kind: str) -> None:
    """It reads image features where its language model has none. A server loads the language model alone."""
    model = wrapper(kind)
    with pytest.raises(AttributeError, match="image_outputs"):
        model(tiny_tokens(1, 8))
    with patched(tiny_model("llama4_text")) as patch:
        assert patch.attention_seam.temperatures.keys() == {
            layer for layer, role in patch.roles.items() if role == "never"
        }


@kinds("qwen2_5_vl")
def test_images_are_refused(kind: str) -> None:
    model, tokens = wrapper(kind), tiny_tokens(1, 8)
    planes = torch.arange(8).expand(3, 1, 8)
    with patched(model):
        with pytest.raises(ValueError, match="pixel_values: a patched model takes text only"):
            model(tokens, pixel_values=torch.zeros(4, 12))
        with pytest.raises(ValueError, match="alike in every plane"):
            model(tokens, position_ids=planes * torch.tensor([1, 2, 1])[:, None, None])
        assert torch.equal(model(tokens, position_ids=planes).logits, model(tokens).logits)


@kinds("paligemma")
def test_attention_in_both_directions_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="its attention is bidirectional"), patched(wrapper(kind)):
        raise AssertionError("never entered")
