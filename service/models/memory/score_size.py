"""Tokens that passes of evaluations may cache together, beside the weights and the paged caches."""

from __future__ import annotations

import math

from patches import Patched
from service.models.memory.cache_size import cache_bytes_per_token
from service.settings import Settings

MOST_TOKENS = 262144
"""Default of a model with ample memory, and longest pass that a default allows."""

SHARE = 2 / 3
"""Of the memory that weights and paged caches leave. Steps need some of the rest: logits, masks, hidden states."""


def step_layers(patch: Patched) -> float:
    """Layers' worth of keys and values that a step of a pass needs beside the cache.

    A cache that evicts grows by copying, and grouped heads are expanded.
    """
    return 1 + 2 * max(patch.cached.expanded / (patch.cached.heads * patch.cached.width), 1.0)


def score_bytes_per_token(patch: Patched) -> int:
    """Bytes that one token of a pass takes: its cache, and one layer's again ``step_layers`` times."""
    layers = len(patch.caching_layers)
    return math.ceil(cache_bytes_per_token(patch) * (1 + step_layers(patch) / layers))


def score_bytes(left: int) -> int:
    """Bytes of all passes on a device whose weights and paged caches leave ``left``."""
    return int(left * SHARE)


def score_tokens(patch: Patched, room: int, settings: Settings) -> int:
    """Tokens of a model's passes: what fits into ``room`` bytes, at most as configured, else ``MOST_TOKENS``."""
    return min(settings.score_tokens or MOST_TOKENS, max(2, room // score_bytes_per_token(patch)))
