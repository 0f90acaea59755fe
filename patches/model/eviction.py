"""Dropping keys that no later query can reach, for recipes that attend to the first and the last tokens only.

StreamingLLM, arXiv:2309.17453, section 3.2. Masking those keys gives the same numbers; dropping them frees
their memory, so that a cache stops growing with the text.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class CacheLayer(Protocol):
    """A layer of a transformers ``DynamicCache``: keys and values [rows, heads, tokens, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


def evict(layers: list[Any], first: int, last: int) -> None:
    """Keep the ``first`` and the newest ``last`` - 1 tokens of every layer that keeps all of them.

    The next query is itself the last one it reaches. Layers that slide keep their own window.
    """
    newest = last - 1
    for layer in layers:
        if getattr(layer, "is_sliding", False) or layer.keys.shape[-2] <= first + newest:
            continue
        layer.keys, layer.values = (_kept(states, first, newest) for states in (layer.keys, layer.values))


def _kept(states: torch.Tensor, first: int, newest: int) -> torch.Tensor:
    tail = states[..., states.shape[-2] - newest :, :]
    return torch.cat((states[..., :first, :], tail), dim=-2)
