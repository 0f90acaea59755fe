"""A Llama checkpoint of transformers as a GGUF file in float32, as llama.cpp's ``convert_hf_to_gguf.py`` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter, TokenType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
IN_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model: Any, *, context_length: int) -> None:
    """Write a LlamaForCausalLM; its tokens have numbers for texts, since tests send token ids."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{token}>" for token in range(config.vocab_size)])
    writer.add_token_types([TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["< 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, weight in model.state_dict().items():
        if not (name.startswith("lm_head") and config.tie_word_embeddings):
            writer.add_tensor(_name(name), _paired(name, weight.float(), config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{IN_A_LAYER[rest]}.weight"


def _paired(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp rotates pairs (2i, 2i + 1) of a Llama, transformers pairs (i, i + d/2)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for kind, count in heads.items():
        if kind in name:
            rows = weight.shape[0] // count // 2
            return weight.reshape(count, 2, rows, -1).transpose(1, 2).reshape(weight.shape)
    return weight
