"""The size of a paged cache beside the weights of a model."""

from __future__ import annotations

from patches import Patched
from service.engine.limits import spare_places
from service.models.checkpoint.loading import ModelLoadError
from service.settings import Settings

CPU_REACH = 32
"""Default cache on a CPU in trained lengths: how far an encoding may stretch, and where default lengths end."""

CPU_CACHE_TOKENS = 32768
"""Most tokens of a default cache on a CPU, where memory is shared with everything else."""


def cache_bytes_per_token(patch: Patched) -> int:
    """Bytes that keys and values of one token take over the layers that attend, as they reach the attention.

    Rows of pages are alike. Layers that share the keys of others have no pages.
    """
    cached, layers = patch.cached, len(patch.caching_layers)
    return int(2 * layers * cached.calls * cached.heads * cached.width * patch.model.dtype.itemsize)


def kept_bytes(patch: Patched, tokens: int) -> int:
    """Bytes that keys and values of a text of ``tokens`` take: layers with a window keep no more."""
    masks = patch.local_masks
    windows = [masks.get(layer) for layer in patch.caching_layers]
    kept = sum(tokens if window is None else min(tokens, window.most_keys) for window in windows)
    return kept * cache_bytes_per_token(patch) // len(windows)


def cache_tokens(patch: Patched, settings: Settings, free: int, among: int = 1, *, padded: bool = False) -> int:
    """Tokens of cached keys and values, as configured; else as fit into ``free`` bytes, for one of ``among`` models.

    On an accelerator they take 70 % of the free memory. ``padded`` rows have half of that, for states of recurrent
    layers may take as much. On a CPU they are 32 times the trained length, at most 32768, or ``max_length`` where
    that is more. There they take at most a quarter of the free memory.

    Raises:
        ModelLoadError: when what is configured exceeds free memory.
    """
    model, per_token = patch.model, cache_bytes_per_token(patch)
    if settings.cache_tokens is not None:
        most = free // per_token - _spare(free // per_token, patch)
        if settings.cache_tokens > most:
            needed = cache_bytes(settings.cache_tokens, patch) >> 20
            raise ModelLoadError(
                f"ROPEWAY_CACHE_TOKENS: {settings.cache_tokens} needs {needed} MiB and {free >> 20} MiB are free: "
                f"at most {most} tokens fit"
            )
        return settings.cache_tokens
    if model.device.type == "cuda":
        wanted = int(free * (0.35 if padded else 0.7) / among) // per_token
    else:
        reach = min(CPU_REACH * patch.geometry.original_max_position_embeddings, CPU_CACHE_TOKENS)
        longest = -(-(settings.max_length or 0) // settings.page_size) * settings.page_size  # in whole pages
        most = int(free * 0.25) // per_token
        wanted = min(max(reach, longest), most - _spare(most, patch))
    return max(settings.page_size * 4, wanted // settings.page_size * settings.page_size)


def reserved_bytes(cache: int, *, padded: bool) -> int:
    """Bytes that a model with a ``cache`` of so many bytes may take: states of ``padded`` rows take as many again."""
    return 2 * cache if padded else cache


def cache_bytes(tokens: int, patch: Patched) -> int:
    """Bytes of a cache of ``tokens``, with those of its spare places."""
    return (tokens + _spare(tokens, patch)) * cache_bytes_per_token(patch)


def _spare(tokens: int, patch: Patched) -> int:
    """Tokens that take as much memory as the spare places of a cache: only keys are written there."""
    return 0 if patch.model.device.type == "cuda" else -(-spare_places(tokens, patch.model.dtype) // 2)
