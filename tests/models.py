"""Tiny random models of the families we carry, built from configurations, never downloaded.

Weights are larger than transformers' default: with a standard deviation of 0.02 attention is so
close to uniform that a wrong encoding would pass a comparison of logits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCAB_SIZE = 128
TRAINED_LENGTH = 64
ROPE_THETA = 10_000.0

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TRAINED_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {**_GROUPED, "head_dim": 16}),
    "mistral": (MistralConfig, {**_GROUPED, "head_dim": 16, "sliding_window": None}),
    "qwen2": (Qwen2Config, _GROUPED),
    "qwen3": (Qwen3Config, {**_GROUPED, "head_dim": 16}),
    "phi3": (Phi3Config, {**_GROUPED, "original_max_position_embeddings": TRAINED_LENGTH, "sliding_window": None}),
    "gpt_neox": (GPTNeoXConfig, {**_SIZES, "rotary_pct": 0.25, "use_parallel_residual": True}),
    "stablelm": (StableLmConfig, {**_GROUPED, "partial_rotary_factor": 0.5}),
    "olmo2": (Olmo2Config, _GROUPED),
    "gemma2": (Gemma2Config, {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}),
    "granite": (
        GraniteConfig,
        {**_GROUPED, "attention_multiplier": 0.25, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    "cohere": (CohereConfig, {**_GROUPED, "logit_scale": 1.0}),
}


def tiny_config(family: str, rope_parameters: dict[str, Any] | None = None, **overrides: Any) -> PreTrainedConfig:
    """Configuration of ``family``; ``rope_parameters`` selects a native scaling, as in a checkpoint's config."""
    config_class, sizes = FAMILIES[family]
    rope = {"rope_theta": ROPE_THETA, **copy.deepcopy(rope_parameters or {"rope_type": "default"})}
    return config_class(**{**sizes, "rope_parameters": rope, **overrides})


def tiny_model(
    family: str,
    rope_parameters: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    attn_implementation: str = "eager",
    **overrides: Any,
) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """(configuration, float32 model in eval mode). Equal seeds give equal weights, whatever the encoding."""
    config = tiny_config(family, rope_parameters, **overrides)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation, dtype=torch.float32
    )
    randomise(model, seed)
    model.train(False)
    return config, model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Matrices with columns of unit length on average; vectors (norms, biases) moved off their defaults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * noise)


def tiny_tokens(rows: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Random token ids [rows, length], special tokens avoided."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)
