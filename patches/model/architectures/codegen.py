"""CodeGen: GPT-J with one projection, made for four processors. Each quarter of it has the queries, values and keys of
a quarter of the heads.

Equal to transformers within float32 rounding, as GPT-J is.
"""

from __future__ import annotations

from typing import Any

import torch

from patches.model.architectures.architecture import Architecture, Seams
from patches.model.architectures.gptj import attended, facts

QUARTERS = 4


def forward(
    seams: Seams, module: Any, hidden_states: torch.Tensor, layer_past: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    states = module.qkv_proj(hidden_states)
    states = states.view(*states.shape[:2], QUARTERS, 3, -1, module.head_dim)
    query, value, key = (part.flatten(2, 3).transpose(1, 2) for part in states.unbind(3))
    return attended(seams, module, hidden_states, (query, key, value), layer_past)


CODEGEN = Architecture(attention=("CodeGenAttention",), forward=forward, facts=facts)
