"""GPT-J: its attention has a table that rotates interleaved pairs, up to the trained length.

Equal to transformers' eager attention within float32 rounding: theirs is an explicit softmax, ours a fused kernel. In
half precision, theirs takes scores in float32 and rotates in half precision, ours the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from patches.encoding.rotary import rotate
from patches.model.architectures.architecture import Architecture, Seams, split_heads


def forward(
    seams: Seams, module: Any, hidden_states: torch.Tensor, layer_past: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    projections: tuple[nn.Module, ...] = (module.q_proj, module.k_proj, module.v_proj)
    states = (split_heads(projection(hidden_states), module.head_dim) for projection in projections)
    return attended(seams, module, hidden_states, states, layer_past)


def attended(
    seams: Seams, module: Any, hidden_states: torch.Tensor, states: Iterable[torch.Tensor], layer_past: Any
) -> tuple[torch.Tensor, None]:
    """The rest behind the projections: ``states`` are query, key and value [rows, heads, tokens, dim]."""
    query, key, value = states
    cos, sin = (_by_pair(part)[:, None] for part in seams.rotary(hidden_states))
    query, key = (rotate(states, cos, sin, interleaved=True) for states in (query, key))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    output, _weights = seams.attention(module, query, key, value, None, module.head_dim**-0.5, module.attn_dropout.p)
    return module.resid_dropout(module.out_proj(output.flatten(2))), None


def _by_pair(table: torch.Tensor) -> torch.Tensor:
    """Seam A repeats the pairs one after the other where a model has no rotary module to give the layout."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)


def facts(config: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rotary_dim": config.rotary_dim or config.hidden_size,
    }


GPTJ = Architecture(attention=("GPTJAttention", "GPTJFlashAttention2"), forward=forward, facts=facts)
