"""Memory of a pass, computed before it begins."""

from __future__ import annotations

from typing import Any

import torch

from patches import LONG_CONTEXT, Patched, ResolvedRecipe
from service.evaluation.scoring.chunks import LOGITS_BYTES, chunk_length, inner_size, shortened
from service.models.memory.available_memory import available_bytes
from service.models.memory.cache_size import cache_bytes_per_token

MASK_BYTES = 4
"""Per pair of a query and a key: float32, for all layers."""

WORKING = 32 << 20
"""Bytes of constant size: kernels' scratch, the allocator's rounding."""


def pass_bytes(patch: Patched, tokens: int, chunk: int | None, resolved: ResolvedRecipe | None = None) -> int:
    """Most bytes of a pass of ``tokens`` beyond the weights, when its chunks are shortened as on the CPU.

    - The cache, without the keys that sliding layers or ``resolved`` evict after each chunk.
    - One layer's keys and values twice more: a cache that evicts grows by copying, and grouped heads are expanded.
    - A chunk's logits, their softmax and its pieces; a chunk's hidden states.
    - A mask of a chunk against all keys before it. A CPU needs none behind ``LONG_CONTEXT`` keys.
    """
    config = patch.model.config.get_text_config()
    item = patch.model.dtype.itemsize
    chunk = min(chunk_length(chunk, patch), max(tokens, 16))
    ends = None if resolved is None else patch.sink_window(resolved)
    reached = tokens if ends is None else min(tokens, sum(ends) + chunk)
    cached = [reached if window is None else min(reached, window + chunk) for window in _windows(patch, config)]
    per_layer = cache_bytes_per_token(patch) / len(cached)
    queries = patch.geometry.num_attention_heads / patch.cached.heads
    cache = per_layer * (sum(cached) + max(cached) * (1 + 2 * max(queries, 1.0)))
    in_float32 = min(4 * chunk * patch.num_logits, LOGITS_BYTES)
    logits = chunk * patch.num_logits * item + 3 * in_float32
    hidden = 8 * chunk * (config.hidden_size + inner_size(config)) * item
    context = min(max(cached), LONG_CONTEXT) if patch.model.device.type == "cpu" else max(cached)
    mask = MASK_BYTES * shortened(patch, chunk, context) * min(max(cached), context + chunk)
    return int(cache + logits + hidden + mask) + WORKING


def free_bytes(device: torch.device) -> int:
    """Bytes for new tensors on ``device``, torch's reserved memory included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return available_bytes()


def _windows(patch: Patched, config: Any) -> list[int | None]:
    """Keys in the cache of each layer that attends, as transformers' DynamicCache decides; None: all."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    full = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [full] * config.num_hidden_layers
    kinds = (full if layer < 0 else types[layer] for layer in patch.roles)
    return [window if kind in ("sliding_attention", "chunked_attention") else None for kind in kinds]
