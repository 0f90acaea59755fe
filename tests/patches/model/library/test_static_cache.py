"""A static cache of padded rows: ``generate`` makes the masks of a forward before it, some for each type of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StaticCache

from patches import patched
from tests.field import configurations
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import left_padded, relative
from tests.patches.model.architectures.checks import by_kind
from tests.patches.model.library.test_library import OTHER, ROTARY, TOLERANCE, prompts
from tests.patches.model.library.test_transformers_parity import greedy, unpatched

STATIC = {"cache_implementation": "static"}
SHORT = (50, 40, 9)
"""Prompts within the tables of the unpatched models."""

kinds = by_kind("llama", "gptj", "falcon", "bloom", "qwen3", "gemma3", "deepseek_v32", "doge")
BY_LAYER_TYPE = ("qwen3", "gemma3", "gpt_oss", "llama4", "olmo3", "smollm3")


def equals_the_unpatched_model(model: PreTrainedModel) -> None:
    """A padded batch, and a single padded row, in a static cache."""
    ids, mask, _ = left_padded(prompts(SHORT))
    expected, logits = greedy(model, ids, attention_mask=mask, **STATIC)
    with patched(model):
        for rows in (slice(0, 3), slice(1, 2)):
            result, steps = greedy(model, ids[rows], attention_mask=mask[rows], **STATIC)
            assert torch.equal(result, expected[rows])
            assert relative(steps, logits[:, rows]) < TOLERANCE


def equals_a_dynamic_cache(model: PreTrainedModel, encodings: list[Any]) -> None:
    """A padded batch with rows under ``encodings``."""
    ids, mask, _ = left_padded(prompts())
    with patched(model) as patch:
        chosen = patch.encoding(encodings)
        expected, logits = greedy(model, ids, attention_mask=mask, **chosen)
        result, steps = greedy(model, ids, attention_mask=mask, **STATIC, **chosen)
    assert torch.equal(result, expected)
    assert relative(steps, logits) < TOLERANCE


@kinds("llama", "gptj", "falcon", "bloom", *BY_LAYER_TYPE)
def test_a_static_cache_of_padded_rows(kind: str) -> None:
    """Also of models whose attention does not dispatch by name, and of those with several types of layers."""
    model = unpatched(kind) if kind in BY_LAYER_TYPE else tiny_model(kind)[1]
    if kind != "llama4":  # its plain temperatures count padding
        equals_the_unpatched_model(model)
    equals_a_dynamic_cache(model, OTHER.get(kind, ROTARY))


@kinds("deepseek_v32", "doge", "dots3_note_text")
def test_a_static_cache_of_layers_that_choose_keys(kind: str) -> None:
    """They have whole masks, which show the padding in what the last query sees."""
    model = configurations.tiny_model(kind)
    equals_the_unpatched_model(model)
    if kind != "doge":  # it counts empty places of a static cache among those that it chooses from
        equals_a_dynamic_cache(model, ["default", "yarn:4", "linear:2"])


@torch.no_grad()
def test_masks_that_do_not_show_the_padding_are_refused() -> None:
    model, tokens = tiny_model("qwen3")[1], tiny_tokens(1, 40)
    with patched(model):
        cache = StaticCache(model.config, max_cache_len=40)
        model(tokens[:, :20], cache=cache)
        masks = {"full_attention": torch.ones(1, 20)}
        with pytest.raises(ValueError, match="attention_mask: 20 columns do not show the padding of 40 tokens"):
            model(tokens[:, 20:], attention_mask=masks, cache=cache)
