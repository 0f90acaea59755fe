"""Tiny random models of the families we carry, built from configurations, never downloaded.

Weights are larger than transformers' default. With its standard deviation of 0.02, attention is so
close to uniform that a wrong encoding would pass comparisons of logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from _pytest.mark import ParameterSet
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from service.models.architecture import RopewayDemoConfig, RopewayDemoForCausalLM

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

_HEADS = {**_GROUPED, "head_dim": 16}
_FOUR_LAYERS = {**_HEADS, "num_hidden_layers": 4}
_EXPERTS = {"num_experts_per_tok": 1, "num_local_experts": 2}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 2,  # no expert layers
}
WINDOW = 24

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _HEADS),
    "mistral": ("MistralConfig", {**_HEADS, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", _HEADS),
    "phi3": ("Phi3Config", {**_GROUPED, "original_max_position_embeddings": TRAINED_LENGTH, "sliding_window": None}),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, "rotary_pct": 0.25, "use_parallel_residual": True}),
    "stablelm": ("StableLmConfig", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", _GROUPED),
    "gemma2": ("Gemma2Config", {**_HEADS, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}),
    "granite": (
        "GraniteConfig",
        {**_GROUPED, "attention_multiplier": 0.25, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    ),
    "cohere": ("CohereConfig", {**_GROUPED, "logit_scale": 1.0}),
    # Rotates complex numbers, in chunks; every fourth layer rotates nothing and attends to everything.
    "llama4": (
        "Llama4TextConfig",
        {**_FOUR_LAYERS, **_EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": WINDOW, "floor_scale": 16},
    ),
    "mixtral": ("MixtralConfig", {**_HEADS, **_EXPERTS, "sliding_window": None}),
    # Its layers know their window by the mask alone.
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_GROUPED,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_HEADS, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    ),
    "gemma": ("GemmaConfig", _HEADS),
    # The layers that slide have another rotary type.
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_FOUR_LAYERS,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 16,
        },
    ),
    # Half of the layers read the keys of others; a quarter of the values in a gated layer is kept.
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_FOUR_LAYERS,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.75, 0.0, 0.75, 0.0],
        },
    ),
    "olmo3": ("Olmo3Config", {**_GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW}),
    "modernbert_decoder": (
        "ModernBertDecoderConfig",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "local_attention": WINDOW,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "phi": ("PhiConfig", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "olmo": ("OlmoConfig", _GROUPED),
    "cohere2": ("Cohere2Config", {**_FOUR_LAYERS, "sliding_window": WINDOW, "logit_scale": 1.0}),
    "glm4": ("Glm4Config", {**_HEADS, "partial_rotary_factor": 0.5}),
    "smollm3": ("SmolLM3Config", {**_FOUR_LAYERS, "no_rope_layer_interval": 4}),
    "starcoder2": ("Starcoder2Config", {**_GROUPED, "sliding_window": WINDOW}),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_HEADS,
            **_EXPERTS,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "nemotron": ("NemotronConfig", {**_GROUPED, "partial_rotary_factor": 0.5}),
    "exaone4": ("Exaone4Config", {**_FOUR_LAYERS, "sliding_window": WINDOW, "sliding_window_pattern": 4}),
    "ministral3": ("Ministral3Config", _HEADS),
    "persimmon": ("PersimmonConfig", {**_SIZES, "partial_rotary_factor": 0.5}),
    "diffllama": ("DiffLlamaConfig", _GROUPED),  # each layer attends twice, to two halves of its values
}
"""Rotary families: the name of the configuration class in transformers, and tiny sizes."""

_FALCON = {**_SIZES, "multi_query": False, "parallel_attn": False, "bias": True}
_FAIRSEQ = {**_SIZES, "ffn_dim": 96}

OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJConfig", {**_SIZES, "rotary_dim": 8}),
    "codegen": ("CodeGenConfig", {**_SIZES, "rotary_dim": 8}),
    "falcon": ("FalconConfig", _SIZES),  # one key for all heads, as in Falcon-7B
    "falcon_grouped": ("FalconConfig", {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_full": ("FalconConfig", _FALCON),
    "falcon_rw": ("FalconConfig", {**_FALCON, "alibi": True}),
    "bloom": ("BloomConfig", {**_SIZES, "seq_length": TRAINED_LENGTH}),
    "mpt": (
        "MptConfig",
        {
            **_SIZES,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": TRAINED_LENGTH,
            "attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.3},
        },
    ),
    "gpt2": ("GPT2Config", _SIZES),
    # The second layer attends to a window.
    "gpt_neo": ("GPTNeoConfig", {**_SIZES, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}),
    "opt": ("OPTConfig", {**_FAIRSEQ, "word_embed_proj_dim": 32}),
    "biogpt": ("BioGptConfig", _SIZES),
    "xglm": ("XGLMConfig", {**_FAIRSEQ, "d_model": 64, "num_layers": 2, "attention_heads": 4}),
}
"""Families whose attention does not dispatch by name, or whose positions are not rotary: each has a seam."""

_EVERYDAY = {"llama", "gemma3", "gpt_neox", "gpt2", "bloom"}
"""Families of the fast tier. They cover one rotary type, one per layer type, a part of each head, a table, a bias."""


def by_tier(families: Iterable[str]) -> list[ParameterSet]:
    """Parameters of a test of ``families``; most of them are marked slow."""
    return [pytest.param(name, marks=() if name in _EVERYDAY else pytest.mark.slow) for name in families]


every_family = pytest.mark.parametrize("family", by_tier(FAMILIES))

BY_LAYER_TYPE = {"gemma3", "gemma3n", "olmo3", "modernbert_decoder"}
"""Families whose ``rope_parameters`` are given by layer type; what is asked for goes to the full layers."""

WITH_A_WINDOW = BY_LAYER_TYPE | {"llama4", "cohere2", "starcoder2", "gpt_oss", "exaone4", "qwen2_moe"}
"""Families with layers that attend to a window or a chunk: their kernels get other masks than transformers' do."""

EAGER_ONLY = {"gemma2", "gpt_oss"}
"""Families without SDPA in transformers (a limit on scores, sinks): the model to equal is the eager one."""


def tiny_config(family: str, rope_parameters: dict[str, Any] | None = None, **overrides: Any) -> PreTrainedConfig:
    """Configuration of ``family``; ``rope_parameters`` selects a native scaling, as in a checkpoint's config."""
    if family in OTHER_FAMILIES and rope_parameters is None:
        config_class, sizes = OTHER_FAMILIES[family]
        other: PreTrainedConfig = getattr(transformers, config_class)(**copy.deepcopy({**sizes, **overrides}))
        return other
    config_class, sizes = {**FAMILIES, **OTHER_FAMILIES}[family]
    rope = {"rope_theta": ROPE_THETA, **copy.deepcopy(rope_parameters or {"rope_type": "default"})}
    if family == "ministral3":  # its attention reads the strength of its temperature from there
        rope = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": TRAINED_LENGTH, **rope}
    if family in BY_LAYER_TYPE:
        own = {"rope_type": "default", "rope_theta": 2 * ROPE_THETA}
        rope = {"full_attention": rope, "sliding_attention": own}
    config: PreTrainedConfig = getattr(transformers, config_class)(**{**sizes, "rope_parameters": rope, **overrides})
    return config


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
    torch.manual_seed(seed)  # some parameters keep what their class draws for them
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation, dtype=torch.float32
    )
    randomise(model, seed)
    model.train(False)
    return config, model


def demo_model(position_family: str, **overrides: Any) -> PreTrainedModel:
    """The demo model of a family that no Llama carries, float32 in eval mode."""
    sizes = {name: _SIZES[name] for name in _SIZES if name != "pad_token_id"} | overrides
    model: PreTrainedModel = RopewayDemoForCausalLM(RopewayDemoConfig(position_family=position_family, **sizes))
    randomise(model, 0)
    return model.train(False)


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
