"""MPT: ALiBi, with its exponent in the configuration, and clipped projections.

Equal to transformers within float32 rounding for ``alibi_bias_max`` 8. Another value takes effect here.
transformers 5.24 ignores it, although the weights were trained with it.
"""

from __future__ import annotations

from typing import Any

import torch

from patches.model.architectures.architecture import Architecture, Seams, never, split_heads


def forward(
    seams: Seams, module: Any, hidden_states: torch.Tensor, cache: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    states = module.Wqkv(hidden_states)
    if module.clip_qkv:
        states = states.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (split_heads(part, module.head_dim) for part in states.chunk(3, dim=2))
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    output, _weights = seams.attention(module, query, key, value, None, module.softmax_scale)
    return module.out_proj(output.flatten(2)), None


def facts(config: Any) -> dict[str, Any]:
    longest = {"max_position_embeddings": config.max_seq_len}
    if not config.attn_config.alibi:  # transformers has no other form of MPT
        return longest
    return {"native": {"method": "alibi", "alibi_bias_max": config.attn_config.alibi_bias_max}, **longest}


def agrees(config: Any) -> bool:
    return bool(config.attn_config.alibi_bias_max == 8)


MPT = Architecture(attention=("MptAttention",), forward=forward, facts=facts, rotates=never, agrees=agrees)
