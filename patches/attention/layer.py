"""Facts about the attention of one layer that do not depend on the encoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from patches.encoding.masks import CAUSAL, LayerMask
from patches.encoding.recipe import AttentionTemperature


@dataclass(frozen=True, eq=False)
class Layer:
    """``scaling`` is the factor on the scores, ``mask`` a sliding window or a chunk.

    ``softcap`` is a soft limit on scores (Gemma 2). ``sinks`` [heads] are learned logits of attending to nothing
    (gpt-oss), or [rows, heads, q, 1] depend on the token (Inkling 2). ``attention`` is the module, for encodings that
    read weights there. ``temperature`` multiplies the scores beside that of the recipe (Llama 4). ``bias`` [rows, heads
    or 1, q, k] is added to the scores. A -inf excludes a key that the layer did not choose (DeepSeek-V3.2, Doge).
    ``relative_logits`` [rows, heads, q, k] are a part of the scores, which temperatures multiply (Inkling).
    """

    scaling: float
    mask: LayerMask = CAUSAL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    attention: nn.Module | None = None
    temperature: AttentionTemperature | None = None
    bias: torch.Tensor | None = None
    relative_logits: torch.Tensor | None = None

    @property
    def is_ordinary(self) -> bool:
        """True if the layer changes its scores by their scaling and its mask only."""
        unchanged = self.softcap is None and self.sinks is None and self.temperature is None
        return unchanged and self.bias is None and self.relative_logits is None

    @property
    def sink_logits(self) -> torch.Tensor | None:
        """``sinks`` as [rows or 1, heads, q or 1, 1]."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 4 else self.sinks.reshape(1, -1, 1, 1)

    def part(self, rows: slice, queries: slice, keys: slice) -> Layer:
        """The layer for a part of the batch."""
        own: dict[str, Any] = {}
        if self.bias is not None:
            own["bias"] = self.bias[rows, :, queries, keys]
        if self.relative_logits is not None:
            own["relative_logits"] = self.relative_logits[rows, :, queries, keys]
        if self.sinks is not None and self.sinks.ndim == 4:
            own["sinks"] = self.sinks[rows, :, queries]
        return replace(self, **own) if own else self


def index_of(attention: nn.Module) -> int:
    """Index of the layer of an attention module; -1 for a module that several layers share (Zamba)."""
    named = "layer_idx" if hasattr(attention, "layer_idx") else "layer_id"  # GPT-Neo
    index: int | None = getattr(attention, named)
    return -1 if index is None else index


def is_among_tokens(attention: nn.Module) -> bool:
    """False for a module that attends to other states of the same token, as to those of earlier layers (Inkling 2).

    It is no layer: it has no index.
    """
    return hasattr(attention, "layer_idx") or hasattr(attention, "layer_id")


def among_others(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Output [rows, queries, heads, value dim] of an attention that is not among tokens, so no encoding changes it."""
    return functional.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2).contiguous()


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


def bias_of_blocks(block_indices: torch.Tensor, block_size: int, query: torch.Tensor, keys: int) -> torch.Tensor:
    """``Layer.bias`` of blocks of keys, chosen [rows, groups, q, chosen] for groups of heads; -1 is no block."""
    rows, groups, new, _ = block_indices.shape
    blocks = -(-keys // block_size)
    bias = query.new_full((rows, groups, new, blocks + 1), float("-inf"))
    bias = bias.scatter(-1, block_indices.long().remainder(blocks + 1), 0.0)[..., :blocks]  # -1 is behind the last
    return bias.repeat_interleave(block_size, -1)[..., :keys].repeat_interleave(query.shape[1] // groups, 1)


def _excluding(mask: torch.Tensor) -> float:
    """Half the number that excludes a key in transformers: sums with scores exclude it too."""
    return torch.finfo(mask.dtype).min / 2
