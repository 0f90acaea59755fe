"""Facts about the attention of one layer that do not depend on the encoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from patches.encoding.masks import CAUSAL, LayerMask
from patches.encoding.recipe import AttentionTemperature


@dataclass(frozen=True, eq=False)
class Layer:
    """``scaling`` is the factor on the scores, ``mask`` a sliding window or a chunk.

    ``softcap`` is a soft limit on scores (Gemma 2), ``sinks`` [heads] are learned logits of attending to nothing
    (gpt-oss). ``attention`` is the module, for encodings that read weights there. ``temperature`` multiplies the scores
    beside that of the recipe (Llama 4).
    """

    scaling: float
    mask: LayerMask = CAUSAL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attention: nn.Module | None = None
    temperature: AttentionTemperature | None = None
