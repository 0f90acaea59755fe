"""Sizes of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_SPARE = 2048
"""Most places of a layer in which keys turn for one call."""


@dataclass(frozen=True)
class EngineLimits:
    """Sizes in tokens unless the name says otherwise. ``shared``: several tenants use the engine, and none may take
    all of it. No request is longer than ``max_length``; None leaves that to the cache."""

    cache_tokens: int
    score_tokens: int
    page_size: int = 32
    max_length: int | None = None
    max_batch_tokens: int = 1024
    max_requests_per_batch: int = 128
    max_queue: int = 256
    max_queue_tokens: int | None = None
    stall_timeout_s: float = 120.0
    prefix_sharing: bool = True
    shared: bool = False


def spare_places(places: int, dtype: torch.dtype) -> int:
    """Places that a cache on a CPU has beside so many ``places`` of requests: an eighth at most, in float32 alone."""
    return min(MOST_SPARE, places // 8) if dtype.itemsize == 4 else 0
