"""Sizes of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """Sizes in tokens unless the name says otherwise. ``shared``: several tenants use the engine, and none may take
    all of it."""

    cache_tokens: int
    score_tokens: int
    page_size: int = 32
    max_batch_tokens: int = 1024
    max_requests_per_batch: int = 128
    max_queue: int = 256
    max_queue_tokens: int | None = None
    stall_timeout_s: float = 120.0
    prefix_sharing: bool = True
    shared: bool = False
