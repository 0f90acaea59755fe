"""Ordinary layers that read keys in the whole cache. They keep as much as stays the same from step to step.

While a few sequences decode, the Python between two products of the model takes as long as the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from patches.attention.decode.plan import Decoding, Row, States
from patches.attention.decode.shared import Cached
from patches.attention.layer import Layer
from patches.batch.segments import Batch


class LayerInPlace(NamedTuple):
    """A ``layer`` as it was called in a step: what it has ``cached``, and the ``decoding`` of its kind.

    The outputs of some sequences are ``decided`` as in ``Plan.attend``.
    """

    layer: Layer
    cached: Cached
    decoding: Decoding
    decided: Callable[[Row, int, States], torch.Tensor]

    def has_begun(self, layer: Layer, batch: Batch) -> bool:
        """True for a call of the same ``layer`` in a step that another layer of its kind has begun."""
        row = self.decoding.row
        return self.layer is layer and row is not None and row.batch is batch

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As ``PackedAttention.attend``."""
        row, plan, (keys, values) = self.decoding.row, self.decoding.plan, self.cached
        assert row is not None
        assert row.written is not None
        assert plan is not None
        keys.index_copy_(1, row.written, key[0])
        values.index_copy_(1, row.written, value[0])
        return plan.attend(row, query, self.cached, self.layer.scaling, self.decided)


@dataclass
class LayersInPlace:
    """State of the layers of one cache between steps: ``decoding`` by kind of layer, and ``layers`` by index."""

    decoding: dict[Hashable, Decoding] = field(default_factory=dict)
    layers: dict[int, LayerInPlace] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget a step that has failed: only some layers have turned its keys."""
        self.decoding.clear()
        self.layers.clear()
