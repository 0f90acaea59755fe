"""GPT-Neo: the learned table of GPT-2, scores without a scale, and a window in its local layers.

Equal to transformers' eager attention within float32 rounding: theirs is an explicit softmax, ours a fused kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from patches.model.architectures.architecture import Architecture, Seams, never, split_heads
from patches.model.architectures.gpt2 import facts, positions


def forward(
    seams: Seams, module: Any, hidden_states: torch.Tensor, layer_past: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = (
        split_heads(projection(hidden_states), module.head_dim)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_id)
    window = module.config.window_size if module.attention_type == "local" else None
    p = module.attn_dropout.p
    output, _weights = seams.attention(module, query, key, value, None, 1.0, p, sliding_window=window)
    return module.resid_dropout(module.out_proj(output.flatten(2))), None


GPT_NEO = Architecture(
    attention=("GPTNeoSelfAttention", "GPTNeoFlashAttention2"),
    forward=forward,
    facts=facts,
    rotates=never,
    positions=positions,
)
