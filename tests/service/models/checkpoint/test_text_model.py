"""Checkpoints that also take images: their language model is loaded and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from patches import patched
from service.models.checkpoint.text_model import class_for, drop_other_parts
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import logits_of
from tests.patches.model.architectures.test_multimodal import wrapper


@pytest.mark.parametrize("kind", ["qwen3_5", "mistral3", "gemma3", pytest.param("llama4", marks=pytest.mark.slow)])
@torch.no_grad()
def test_text_of_a_checkpoint_with_images(kind: str, tmp_path: Path) -> None:
    """transformers has the language model of Qwen3.5 and Llama 4 alone, of Gemma 3 and Mistral 3 within the whole."""
    whole, tokens = wrapper(kind), tiny_tokens(1, 20)
    whole.save_pretrained(tmp_path)
    loaded: Any = class_for(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    drop_other_parts(model)
    assert sum(weight.numel() for weight in model.parameters()) < sum(weight.numel() for weight in whole.parameters())
    computes = whole.language_model if kind == "llama4" else whole  # the whole fails in transformers 5.24 itself
    expected = computes(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    with patched(model):
        assert torch.equal(logits_of(model, tokens), expected)


def test_a_model_of_text_keeps_every_part() -> None:
    for family in ("llama", "gpt2", "opt"):
        assert drop_other_parts(tiny_model(family)[1]) == []


def test_types_of_text_load_as_ever() -> None:
    assert class_for(CONFIG_MAPPING["llama"]()).__name__ == "AutoModelForCausalLM"
    assert class_for(CONFIG_MAPPING["bert"]()).__name__ == "AutoModelForCausalLM"
    assert class_for(CONFIG_MAPPING["qwen2_5_vl"]()).__name__ == "AutoModelForImageTextToText"
