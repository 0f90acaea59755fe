"""BLOOM: ALiBi by key index in the model, by distance here.

The two differ by a constant per query, which softmax ignores. Results are equal within float32 rounding, which grows
with the index in their form. In half precision their biases are rounded too, to 4 at key 1000; ours stay float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import dropout

from patches.model.architectures.architecture import Architecture, Seams, never

TRAINED_LENGTH = 2048  # arXiv:2211.05100, table 3, where a configuration does not say


def forward(
    seams: Seams,
    module: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    layer_past: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    states = module.query_key_value(hidden_states)
    states = states.view(*states.shape[:2], module.num_heads, 3, module.head_dim)
    query, key, value = (states[..., part, :].transpose(1, 2) for part in range(3))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    p = module.attention_dropout.p
    output, _weights = seams.attention(module, query, key, value, None, module.inv_norm_factor, p)
    return residual + dropout(module.dense(output.flatten(2)), module.hidden_dropout, module.training), None


def facts(config: Any) -> dict[str, Any]:
    longest = getattr(config, "seq_length", None) or TRAINED_LENGTH
    return {"native": {"method": "alibi"}, "max_position_embeddings": longest}


BLOOM = Architecture(attention=("BloomAttention",), forward=forward, facts=facts, rotates=never)
