"""What one layer's attention has of its own, whatever encoding a request chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from patches.encoding.masks import CAUSAL, LayerMask
from patches.encoding.recipe import AttentionTemperature


@dataclass(frozen=True, eq=False)
class Layer:
    """``mask`` is its own (sliding window, chunk), ``softcap`` its soft limit on scores (Gemma 2), ``sinks``
    [heads] its learned logits of attending to nothing (gpt-oss), ``scaling`` the factor on its scores.
    ``attention`` is its module, for encodings that read weights of their own there; ``temperature`` multiplies
    its scores whatever the recipe's does (Llama 4)."""

    scaling: float
    mask: LayerMask = CAUSAL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attention: nn.Module | None = None
    temperature: AttentionTemperature | None = None
