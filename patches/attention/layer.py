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
    beside that of the recipe (Llama 4). ``bias`` [rows, heads or 1, q, k] is the layer's own, added to the scores: -inf
    excludes a key that the layer did not choose (DeepSeek-V3.2, Doge).
    """

    scaling: float
    mask: LayerMask = CAUSAL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attention: nn.Module | None = None
    temperature: AttentionTemperature | None = None
    bias: torch.Tensor | None = None


def bias_of(
    attention_mask: torch.Tensor | None, indices: torch.Tensor | None, query: torch.Tensor, keys: int
) -> torch.Tensor | None:
    """``Layer.bias`` of a mask [rows, heads or 1, q, k], booleans or numbers, and of chosen keys [rows, q, chosen].

    None for a padding mask without chosen keys.
    """
    bias = None
    if attention_mask is not None and attention_mask.ndim == 4:
        numbers = (
            attention_mask.new_zeros(1, dtype=query.dtype) if attention_mask.dtype == torch.bool else attention_mask
        )
        excluded = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask <= _excluding(numbers)
        bias = torch.where(excluded, float("-inf"), numbers)
    if indices is not None:
        chosen = query.new_full((query.shape[0], 1, query.shape[2], keys), float("-inf"))
        chosen = chosen.scatter(-1, indices.long()[:, None], 0.0)
        bias = chosen if bias is None else bias + chosen
    return bias


def _excluding(mask: torch.Tensor) -> float:
    """Half the number that excludes a key in transformers: sums with scores exclude it too."""
    return torch.finfo(mask.dtype).min / 2
