"""Tiny configurations of every type in transformers' causal mapping: one rule, and a table of exceptions.

The rule takes the default configuration of a type and shrinks its sizes, by the names that transformers gives them. The
structure remains: kinds of layers, experts, latent attention, partial rotation. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.models import randomise

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every type that ``AutoModelForCausalLM`` builds."""

WITH_IMAGES = tuple(name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in TYPES)
"""Types that only ``AutoModelForImageTextToText`` builds."""

VOCAB_SIZE, TRAINED_LENGTH, WINDOW, HEAD_DIM = 128, 64, 24, 16

_FIELDS_OF_A_SIZE = (
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input unpadded_vocab_size shape_vocab_size pronunciation_vocab_size"),
    (
        TRAINED_LENGTH,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length max_target_positions "
        "original_max_position_embeddings seq_length",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size local_attention window_size attention_chunk_size "
        "local_attention_window_len keep_window_size floor_scale log_scaling_n_floor",
    ),
    (
        64,
        "hidden_size d_model n_embd emb_dim word_embed_proj_dim embedding_dim embedding_size lru_width mamba_d_ssm "
        "attention_hidden_size adapter_in_dim adapter_out_dim adapter_input_size input_embedding_size "
        "hidden_size_global output_embedding_size shape_embed_dim pronunciation_embed_dim",
    ),
    (
        96,
        "intermediate_size ffn_dim dff dim_ff d_inner feed_forward_size ffn_hidden_size intermediate_size_mlp n_inner "
        "dense_intermediate_size encoder_ffn_dim decoder_ffn_dim",
    ),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size mamba_headdim "
        "shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size router_hidden_size "
        "attention_head_dim index_n_heads",  # few heads of an indexer give many keys a score of exactly 0, and ties
    ),
    (
        16,
        "head_dim kv_channels d_kv dim_head swa_head_dim swa_v_head_dim attention_head_size d_head qk_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim index_head_dim "
        "kv_lora_rank q_lora_rank o_lora_rank mamba_d_state ssm_state_size state_size time_step_rank mamba_dt_rank "
        "chunk_size mamba_chunk_size hidden_size_per_layer_input laurel_rank adapter_rank hc_lowrank",
    ),
    (12, "v_head_dim"),
    (8, "qk_rope_head_dim qk_nope_head_dim rotary_dim index_topk d_rel mamba_n_heads"),
    (
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
        "swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads mamba_num_heads "
        "n_mamba_heads linear_num_heads linear_num_value_heads num_experts n_routed_experts num_local_experts "
        "moe_num_experts zero_expert_num",
    ),
    (
        2,
        "num_key_value_heads swa_num_key_value_heads num_kv_heads num_query_groups linear_num_key_heads n_groups "
        "mamba_n_groups n_group num_expert_group o_groups num_experts_per_tok num_experts_per_token "
        "moe_topk moe_k",
    ),
    (1, "topk_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers"),
)

SIZES = {name: size for size, names in _FIELDS_OF_A_SIZE for name in names.split()}
"""Field -> its size here, for types whose default configuration has that field."""

LAYERS = 2
_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "encoder_layers",
    "decoder_layers",
)
_BY_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "indexer_types",
    "no_rope_layers",
    "layer_rope_theta",
)
"""Fields with an entry per layer."""

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_hidden_layers": 4,
    "attention_hidden_size": 128,
}
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}

_SECTIONS = {
    "ernie4_5_vl_moe_text": (3, 3, 2),
    **dict.fromkeys(("glm4v_moe_text", "hy_v4_vl_text"), (2, 1, 1)),
    **dict.fromkeys(
        (
            *("cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text"),
            *("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
        ),
        (2, 3, 3),
    ),
}
"""Type of a language model -> pairs of each plane of its positions (M-RoPE), for heads as small as these."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 20},
        "index_topk": 4,
        "partial_rotary_factor": 0.5,
        "rope_parameters": None,  # by type of layer, made from the others
    },
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 20},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {**_SHARED_KEYS, "intermediate_size": 96, "activation_sparsity_pattern": [0.0] * 4},
    "glm5_next_text": {"index_topk": 8, "index_kpool": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "inkling2_loop_text": {
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["sparse"] * 4,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "n_layers_per_attn_res_block": 2,
    },
    "granite_docling_vision": {"out_hidden_size": 64},
    "inkling2_vision": {"text_hidden_size": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"head_dim": 24},  # a third of it rotates, in pairs
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 8,
        "index_n_heads": 2,
        "index_topk_blocks": 2,
    },
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": _ZAMBA,
    "zamba2": {**_ZAMBA, "num_key_value_heads": 4, "num_mem_blocks": 2, "use_shared_attention_adapter": True},
    "zaya": {"num_experts_per_tok": 1},
}
"""Type -> fields that the rule does not find."""

_FALCON = {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True}
_SHARED_WIDER_KEYS = {**_SHARED_KEYS, "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}}}
_FEWER_WIDER_KEYS = {"per_layer_config": {1: {"head_dim": 32, "num_key_value_heads": 1}}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (grouped keys)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon (a key per head)": ("falcon", _FALCON),
    "falcon (ALiBi)": ("falcon", {**_FALCON, "alibi": True}),
    "gemma4_text (keys as values)": ("gemma4_text", {"attention_k_eq_v": True, **_FEWER_WIDER_KEYS}),
    "gemma4_text (shared keys)": ("gemma4_text", _SHARED_WIDER_KEYS),
    "granitemoehybrid (RoPE)": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "zamba2 (RoPE)": ("zamba2", {"use_mem_rope": True}),
}
"""Name -> type and fields: published models of a type that differ in their attention from its default."""

CANNOT_BE_BUILT = {
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "its small form has a gigabyte of weights"),
    "gemma3n": "its vision part needs timm; its text part is gemma3n_text",
    "gemma4_assistant": "it drafts for another model and reads the keys and values of that model",
    "gemma4_unified_assistant": "it drafts for another model and reads the keys and values of that model",
}
"""Type -> why no model of it runs alone."""


class CannotBeBuilt(ValueError):
    """No small model of this type can be built; the message says why."""


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small valid configuration of ``model_type``; ``overrides`` are fields of it.

    Raises:
        CannotBeBuilt: for a type that runs only with another model or another library.
    """
    if model_type in CANNOT_BE_BUILT:
        raise CannotBeBuilt(CANNOT_BE_BUILT[model_type])
    return shrunk(CONFIG_MAPPING[model_type](), overrides)


def tiny_model(
    model_type: str, *, seed: int = 0, attn_implementation: str | None = None, **overrides: Any
) -> PreTrainedModel:
    """A float32 model in eval mode with random weights; equal seeds give equal weights.

    ``attn_implementation`` is transformers' own choice by default: SDPA where the type has it.

    Raises:
        CannotBeBuilt: as ``tiny_config``.
    """
    config = tiny_config(model_type, **overrides)
    builder = AutoModelForCausalLM if model_type in TYPES else AutoModelForImageTextToText
    torch.manual_seed(seed)  # some parameters keep what their class draws for them
    model: PreTrainedModel = builder.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    randomise(model, seed)
    return model.eval()


def shrunk(config: PreTrainedConfig, overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A new configuration like ``config`` with small sizes, its parts included, and ``overrides``."""
    fields = config.to_dict()
    small = {name: size for name, size in SIZES.items() if _is_size(fields.get(name))}
    small |= {name: SIZES[name] for name in ("head_dim", "num_key_value_heads") if name in fields}
    if fields.get("kv_lora_rank"):
        small["num_key_value_heads"] = SIZES["num_attention_heads"]
        if fields.get("head_dim") == fields["qk_rope_head_dim"]:
            small["head_dim"] = SIZES["qk_rope_head_dim"]
    if fields.get("rope_parameters"):
        small["rope_parameters"] = _short(fields["rope_parameters"])
        if sections := _SECTIONS.get(config.model_type):
            small["rope_parameters"]["mrope_section"] = list(sections)
    small |= {name: _TOKEN_IDS[name] for name in _TOKEN_IDS if name in fields}
    small |= _layers(fields, small)
    parts = {name: shrunk(getattr(config, name)) for name in config.sub_configs if getattr(config, name) is not None}
    exceptions = EXCEPTIONS.get(config.model_type, {})
    return type(config)(**{**small, **parts, **exceptions, **(overrides or {})})


def _short(parameters: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` whose scaling begins within the few tokens of a test."""
    return {
        name: _short(value) if isinstance(value, dict) else TRAINED_LENGTH // 4 if "original" in name else value
        for name, value in parameters.items()
    }


_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 1}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layers(fields: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """One layer of every kind, and at least two."""
    counts = [name for name in _LAYER_COUNTS if name in fields]
    depth = fields[counts[0]] if counts else 0
    by_layer = [name for name in _BY_LAYER if len(fields.get(name) or ()) == depth > 0]
    if not by_layer:
        return dict.fromkeys(counts, LAYERS)
    first: dict[tuple[object, ...], int] = {}
    for index, kind in enumerate(zip(*(fields[name] for name in by_layer), strict=True)):
        first.setdefault(kind, index)
    kept = [*first.values()] if len(first) > 1 else [0] * LAYERS
    layers: dict[str, Any] = dict.fromkeys(counts, len(kept))
    layers |= {name: [fields[name][index] for index in kept] for name in by_layer}
    own = {int(index): sizes for index, sizes in fields.get("per_layer_config", {}).items()}
    if own:  # sizes of single layers keep their ratio to those of the others
        layers["per_layer_config"] = {
            layer: {name: small[name] * size // fields[name] for name, size in own.get(index, {}).items()}
            for layer, index in enumerate(kept)
        }
    return layers
