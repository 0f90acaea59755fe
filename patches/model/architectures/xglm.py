"""XGLM: sinusoids, all sines before all cosines, position 0 at index 2.

Equal to transformers within float32 rounding: theirs is an explicit softmax, ours a fused kernel. The position
embeddings themselves are equal to the bit, also past the table.
"""

from __future__ import annotations

from typing import Any

import torch

from patches.model.absolute import Sinusoid
from patches.model.architectures.architecture import Architecture, Seams, never, split_heads


def forward(
    seams: Seams,
    module: Any,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if key_value_states is not None:
        raise ValueError("encoder_hidden_states: attention across two sequences has no encoding to choose")
    # Scaled before the scores, as the model does it.
    query, key, value = (
        split_heads(states, module.head_dim)
        for states in (
            module.q_proj(hidden_states) * module.scaling,
            module.k_proj(hidden_states),
            module.v_proj(hidden_states),
        )
    )
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    output, _weights = seams.attention(module, query, key, value, None, 1.0)
    return module.out_proj(output.flatten(2)), None


def positions(model: Any) -> Sinusoid:
    module = model.model.embed_positions
    return Sinusoid(module, module.weights, module.offset)


def facts(config: Any) -> dict[str, Any]:
    return {"native": {"method": "sinusoidal"}}


XGLM = Architecture(attention=("XGLMAttention",), forward=forward, facts=facts, rotates=never, positions=positions)
