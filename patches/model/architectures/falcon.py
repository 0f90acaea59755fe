"""Falcon: rotary in its 7B, 40B and 180B, ALiBi in its RW models, with slopes and biases in bfloat16.

Equal to transformers' SDPA path within float32 rounding: theirs always takes a mask, ours the causal kernel. The
40B form keeps its grouped keys as they are where transformers caches a copy per query head.
"""

from __future__ import annotations

from typing import Any

import torch

from patches.encoding.rotary import rotate
from patches.model.architectures.architecture import Architecture, Seams


def forward(
    seams: Seams,
    module: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None = None,
    layer_past: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = _projected(module, hidden_states)
    if alibi is None:
        assert position_embeddings is not None
        cos, sin = (part[:, None] for part in position_embeddings)
        query, key = (rotate(states, cos, sin, interleaved=False) for states in (query, key))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    p = module.attention_dropout.p
    output, _weights = seams.attention(module, query, key, value, None, module.inv_norm_factor, p)
    return module.dense(output.flatten(2)), None


def _projected(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [rows, heads, tokens, dim], key and value [rows, kv_heads, tokens, dim]."""
    groups = module.num_kv_heads  # one in the multi-query form, every head in the oldest
    states = module.query_key_value(hidden_states)
    states = states.view(*states.shape[:2], groups, module.num_heads // groups + 2, module.head_dim)
    query, key, value = states[..., :-2, :].flatten(2, 3), states[..., -2, :], states[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rotates(config: Any) -> bool:
    return not config.alibi


def facts(config: Any) -> dict[str, Any]:
    if rotates(config):
        return {}
    return {"native": {"method": "alibi", "bias_dtype": "bfloat16", "scaled": True}}


def agrees(config: Any) -> bool:
    """With ALiBi, transformers' eager attention differs from its own SDPA (5.24)."""
    return rotates(config)


FALCON = Architecture(
    attention=("FalconAttention", "FalconFlashAttention2"),
    forward=forward,
    facts=facts,
    rotates=rotates,
    agrees=agrees,
)
