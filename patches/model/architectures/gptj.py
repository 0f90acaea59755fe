"""GPT-J and CodeGen: their rotary module has a table up to the trained length, sines first, one number per pair."""

from __future__ import annotations

from typing import Any

import torch

from patches.model.architectures.architecture import Architecture, Seams


def table(seams: Seams, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sines and cosines [rows, tokens, pairs], at any position."""
    cos, sin = seams.rotary(x, position_ids)
    pairs = cos.shape[-1] // 2  # seam A repeats the pairs one after the other where no module gives the layout
    return sin[..., :pairs], cos[..., :pairs]


def facts(config: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "rotary_dim": config.rotary_dim or config.hidden_size,
    }


GPTJ = Architecture(rotary=("GPTJRotaryEmbedding", "CodeGenRotaryEmbedding"), table=table, facts=facts)
