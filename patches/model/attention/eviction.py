"""Eviction of keys that no later query can reach, for recipes that attend to the first and last tokens only.

StreamingLLM, arXiv:2309.17453, section 3.2. Masking those keys gives the same numbers. Evicting them frees
their memory, so that a cache stops growing with the text.
"""

from __future__ import annotations

from typing import Any

import torch

from patches.model.written import evicted


def evict(cache: Any, num_sinks: int, window_size: int) -> None:
    """Keep the ``num_sinks`` first and the newest ``window_size`` - 1 tokens of every layer that keeps all of them.

    ``cache`` is a transformers ``DynamicCache``: layers with keys and values [rows, heads, tokens, dim]. The next query
    is the last token in its own window. Layers that slide keep their window, and layers without keys their state.
    """
    newest, before = window_size - 1, cache.get_seq_length()
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if getattr(layer, "is_sliding", False) or keys is None or keys.shape[-2] <= num_sinks + newest:
            continue
        layer.keys, layer.values = (_without_gap(states, num_sinks, newest) for states in (layer.keys, layer.values))
    evicted(cache, before - cache.get_seq_length())


def _without_gap(states: torch.Tensor, num_sinks: int, newest: int) -> torch.Tensor:
    tail = states[..., states.shape[-2] - newest :, :]
    return torch.cat((states[..., :num_sinks, :], tail), dim=-2)
