"""Caches with room for later tokens: a chunk writes its keys in place, where transformers copies all keys before it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """A ``DynamicLayer`` whose keys and values [rows, heads, tokens, dim] begin a tensor of at least ``room`` tokens.

    ``crop`` and eviction see ordinary tensors. Only ``update`` differs: it adds to the tensor it allocated. It copies
    into a new one where the states are others or no room is left.
    """

    def __init__(self, layer: DynamicLayer, room: int) -> None:
        vars(self).update(vars(layer))
        self._room = room
        self._allocated: dict[str, int] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.values is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = self._extended("keys", self.keys, key_states)
        self.values = self._extended("values", self.values, value_states)
        return self.keys, self.values

    def _extended(self, name: str, states: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        num_kv, dim = states.shape[-2:]
        after = num_kv + new.shape[-2]
        room = states.stride(-3) // dim  # tokens between two heads
        if states.data_ptr() == self._allocated.get(name) and after <= room:
            extended = states.as_strided((*states.shape[:-2], after, dim), states.stride())
        else:
            room = max(self._room, after + after // 8)
            extended = states.new_empty((*states.shape[:-2], room, dim))[..., :after, :]
            extended[..., :num_kv, :] = states
            self._allocated[name] = extended.data_ptr()
        extended[..., num_kv:, :] = new
        return extended


def make_room(cache: Any, tokens: int) -> None:
    """Layers of ``cache`` that keep every key get room for ``tokens``. Layers that slide or have states stay."""
    layers = getattr(cache, "layers", [])
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[index] = RoomyLayer(layer, tokens)
