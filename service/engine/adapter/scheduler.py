"""Scheduling by what a step reads."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from service.engine.adapter.cache import EncodingCache


class WindowedScheduler(FIFOScheduler):
    """Counts what a step reads of a request's cache, and not all that the request has ever seen: that may be
    more than the cache holds, and the request would never be scheduled again."""

    cache: EncodingCache

    def _infer_request_tokens(self, state: RequestState, *args: Any) -> list[int]:
        tokens = super()._infer_request_tokens(state, *args)
        self.cache.read_cache_limit = self.cache.most_read(state)  # read right after this, for this request
        return tokens
