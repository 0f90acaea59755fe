"""Memory of a pass, computed before it begins."""

from __future__ import annotations

import math
from typing import Any

from patches import LONG_CONTEXT, Patched, ResolvedRecipe
from service.evaluation.scoring.chunks import LOGITS_BYTES, chunk_length, inner_size, shortened
from service.evaluation.unit import Unit
from service.models.memory.cache_size import cache_bytes_per_token
from service.models.memory.score_size import step_layers

MASK_BYTES = 4
"""Per pair of a query and a key: float32, for all layers."""

WORKING = 32 << 20
"""Bytes of constant size: kernels' scratch, the allocator's rounding."""


def pass_bytes(patch: Patched, tokens: int, chunk: int | None, resolved: ResolvedRecipe | None = None) -> int:
    """Most bytes of a pass of ``tokens`` beyond the weights, when its chunks are shortened as on the CPU.

    - The cache, without the keys that sliding layers or ``resolved`` evict after each chunk.
    - One layer's keys and values again, ``step_layers`` times.
    - A chunk's logits, their softmax and its pieces; a chunk's hidden states.
    - A mask of a chunk against all keys before it. A CPU needs none behind ``LONG_CONTEXT`` keys.
    """
    config = patch.model.config.get_text_config()
    item = patch.model.dtype.itemsize
    chunk = min(chunk_length(chunk, patch), max(tokens, 16))
    cached = _cached(patch, tokens, chunk, resolved)
    per_layer = cache_bytes_per_token(patch) / len(cached)
    cache = per_layer * (sum(cached) + max(cached) * step_layers(patch))
    in_float32 = min(4 * chunk * patch.num_logits, LOGITS_BYTES)
    logits = chunk * patch.num_logits * item + 3 * in_float32
    hidden = 8 * chunk * (config.hidden_size + inner_size(config)) * item
    context = min(max(cached), LONG_CONTEXT) if patch.model.device.type == "cpu" else max(cached)
    mask = MASK_BYTES * shortened(patch, chunk, context) * min(max(cached), context + chunk)
    return int(cache + logits + hidden + mask) + WORKING


def held_tokens(unit: Unit, chunk: int | None) -> int:
    """The memory that grows with a unit's passes, in tokens of a pass of which every layer keeps all."""
    patch = unit.subject.patch
    tokens = longest_pass(unit)
    chunk = min(chunk_length(chunk, patch), max(tokens, 16))
    cached, again = _cached(patch, tokens, chunk, unit.resolved), step_layers(patch)
    whole = (sum(cached) + max(cached) * again) / (len(cached) + again)
    return min(tokens, math.ceil(round(whole, 6)))


def longest_pass(unit: Unit) -> int:
    """Tokens of a unit's longest pass: at most its length, and at most its tokens with a BOS."""
    return min(unit.length, unit.tokens + 1)


def _cached(patch: Patched, tokens: int, chunk: int, resolved: ResolvedRecipe | None) -> list[int]:
    """Most tokens in the cache of each layer, without those that leave it after each chunk."""
    ends = None if resolved is None else patch.sink_window(resolved)
    reached = tokens if ends is None else min(tokens, sum(ends) + chunk)
    windows = _windows(patch, patch.model.config.get_text_config())
    return [reached if window is None else min(reached, window + chunk) for window in windows]


def _windows(patch: Patched, config: Any) -> list[int | None]:
    """Keys in the cache of each layer that has some, as transformers' DynamicCache decides; None: all."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    full = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [full] * config.num_hidden_layers
    kinds = (full if layer < 0 else types[layer] for layer in patch.caching_layers)
    return [window if kind in ("sliding_attention", "chunked_attention") else None for kind in kinds]
