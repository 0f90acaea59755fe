"""Layers that know their sliding window by the mask alone: they hand no window to their attention (Phi-MoE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PhimoeConfig, PreTrainedModel

from patches import patched
from tests.models import WINDOW, randomise, tiny_model
from tests.patches.model.architectures.checks import equals_reference, equals_transformers
from tests.service.engine.adapter.test_architectures import METHODS, check

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
}


def phimoe() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(PhimoeConfig(**SHAPE, num_local_experts=4))
    randomise(model, 0)
    return model.train(False)


def qwen2_moe() -> PreTrainedModel:
    return tiny_model("qwen2_moe", attn_implementation="sdpa")[1]


@pytest.mark.parametrize(("build", "windowed"), [(phimoe, {0: WINDOW, 1: WINDOW}), (qwen2_moe, {0: WINDOW})])
def test_the_window_is_found_and_kept(
    build: Callable[[], PreTrainedModel], windowed: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with patched(model) as patch:
        assert patch.windowed == windowed
        assert patch.smallest_window == WINDOW
    equals_transformers(model)
    equals_reference(model, ("self_extend", "yarn", "alibi"), monkeypatch)


async def test_the_engine_keeps_it() -> None:
    await check(phimoe(), METHODS)
