"""Caches with room for later tokens: a chunk writes its keys in place, where transformers copies all keys before it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

FEWEST = 32
"""Tokens for which a layer that has outgrown its room gets more at least."""


class RoomyLayer(DynamicLayer):
    """A ``DynamicLayer`` whose keys and values [rows, heads, tokens, dim] begin a tensor of at least ``room`` tokens.

    ``crop`` and eviction see ordinary tensors. Only ``update`` differs: it adds to the tensor it allocated. It copies
    into a new one where the states are others or no room is left.
    """

    _room: int
    _keys_at: int
    _values_at: int

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is None or self.values is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys, self._keys_at = self._extended(self.keys, key_states, self._keys_at)
        self.values, self._values_at = self._extended(self.values, value_states, self._values_at)
        return self.keys, self.values

    def _extended(self, states: torch.Tensor, new: torch.Tensor, allocated: int) -> tuple[torch.Tensor, int]:
        """``states`` with ``new``, and the address of the tensor that this layer allocated for them."""
        num_kv, dim = states.shape[-2:]
        after = num_kv + new.shape[-2]
        room = states.stride(-3) // dim  # tokens between two heads
        if states.data_ptr() == allocated and after <= room:
            extended = states.as_strided((*states.shape[:-2], after, dim), states.stride())
        else:
            room = max(self._room, after + FEWEST + after // 16)
            extended = states.new_empty((*states.shape[:-2], room, dim))[..., :after, :]
            extended[..., :num_kv, :] = states
            allocated = extended.data_ptr()
        extended[..., num_kv:, :] = new
        return extended, allocated


class RoomyLayerWithStates(RoomyLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """The same for a layer that has recurrent states too."""


ROOMY = {DynamicLayer: RoomyLayer, LinearAttentionAndFullAttentionLayer: RoomyLayerWithStates}


def make_room(cache: Any, tokens: int) -> None:
    """Layers of ``cache`` that keep every key get room for ``tokens``. Layers that slide stay."""
    for layer in getattr(cache, "layers", []):
        if type(layer) in ROOMY:
            layer.__class__ = ROOMY[type(layer)]
            layer._room, layer._keys_at, layer._values_at = tokens, 0, 0
