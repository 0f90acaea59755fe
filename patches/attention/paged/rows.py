"""An encoding as a row of numbers: position maps, bands, score bias and temperature, each in one form.

Keys and queries are written under the recipe's base map. A band with other maps turns them by the difference when it
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cached_property

import torch

from patches.encoding.positions import AS_IT_IS, NO_LIMIT, MapRow


@dataclass(frozen=True)
class BandRow:
    """Causal pairs with low <= q // chunk - k // chunk < high and k < first, and their two position maps."""

    query_map: MapRow = AS_IT_IS
    key_map: MapRow = AS_IT_IS
    chunk: int = 1
    low: int = 0
    high: int = NO_LIMIT
    first: int = NO_LIMIT

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        """Boolean mask of broadcastable indices."""
        apart = q_idx // self.chunk - kv_idx // self.chunk
        return (kv_idx <= q_idx) & (kv_idx < self.first) & (apart >= self.low) & (apart < self.high)


class BiasKind(IntEnum):
    """Forms of a bias by distance d, of two numbers a and b per head."""

    LINEAR = 1
    """-a d."""
    BFLOAT16 = 2
    """b (a k), with a, the key index k and their product rounded to bfloat16."""
    LOG = 3
    """-a ln(1 + b d)."""
    POWER = 4
    """-a d^b."""
    TABLE = 5
    """The head's table at d, or its last number beyond."""


@dataclass(frozen=True, eq=False)
class BiasRow:
    """``a`` and ``b`` are float32 [heads]. ``table`` is float32 [heads, distances], for the kind TABLE only."""

    kind: BiasKind
    a: torch.Tensor
    b: torch.Tensor
    table: torch.Tensor | None = None

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        """q_idx [q, 1] and kv_idx [1, k] -> float32 [heads, q, k]."""
        distance = (q_idx - kv_idx).clamp_min(0)
        if self.table is not None:
            return self.table.to(q_idx.device)[:, distance.clamp_max(self.table.shape[1] - 1)]
        a, b = (part[:, None, None].to(q_idx.device) for part in (self.a, self.b))
        if self.kind == BiasKind.BFLOAT16:
            return (a.bfloat16() * kv_idx.bfloat16()).float().expand(-1, len(q_idx), -1) * b
        if self.kind == BiasKind.LOG:
            return -a * torch.log1p(b * distance.float())
        return -a * (distance.float() if self.kind == BiasKind.LINEAR else distance.float() ** b)


@dataclass(frozen=True)
class TemperatureRow:
    """max(least, constant + weight ln(1 + (position + shift) // group)), a factor on the scores of a query."""

    constant: float = 1.0
    weight: float = 0.0
    group: int = 1
    shift: int = 0
    least: float = 0.0

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        """Positions int64 [n] -> float64 [n]."""
        grouped = (position + self.shift) // self.group
        return (self.constant + self.weight * grouped.double().log1p()).clamp_min(self.least)


class Variant(IntFlag):
    """Parts of the kernel. A row has the variant that it needs itself, so others in a step change none of its bits."""

    PLAIN = 0
    TURNED = 1
    """Bands turn queries or keys."""
    KEYS = 2
    """Bands turn cached keys."""
    BIASED = 4
    BY_PAIR = 8
    """Maps differ by rotary pair; such rows turn."""
    LINEAR = 16
    """Biases are linear in the distance, which takes a third of the instructions of code for any form."""

    @property
    def label(self) -> str:
        """The names of its parts, such as "turned biased"."""
        return " ".join(str(part.name).lower() for part in self) or "plain"


@dataclass(frozen=True, eq=False)
class Row:
    """One encoding; keys and queries are written under ``base``.

    ``frequencies`` are radians per position and rotary pair with the sign of the model's rotation, empty without
    rotation. ``interleaved`` and ``offset`` place the pairs in a head.
    """

    bands: tuple[BandRow, ...]
    base: MapRow = AS_IT_IS
    frequencies: tuple[float, ...] = ()
    bias: BiasRow | None = None
    temperature: TemperatureRow = TemperatureRow()
    interleaved: bool = False
    offset: int = 0

    @property
    def maps(self) -> tuple[MapRow, ...]:
        """The base, and behind it the maps of queries and keys of every band."""
        return (self.base, *(each for band in self.bands for each in (band.query_map, band.key_map)))

    def turned(self, band: BandRow) -> tuple[bool, bool]:
        """(True if queries turn in ``band``, True if keys do)."""
        query, key = (bool(self.frequencies) and each != self.base for each in (band.query_map, band.key_map))
        return query, key

    @cached_property
    def variant(self) -> Variant:
        variant = Variant.PLAIN if self.bias is None else Variant.BIASED
        if self.bias is not None and self.bias.kind == BiasKind.LINEAR:
            variant |= Variant.LINEAR
        if any(any(self.turned(band)) for band in self.bands):
            variant |= Variant.TURNED
            if any(self.turned(band)[1] for band in self.bands):
                variant |= Variant.KEYS
            if any(each.is_by_pair for each in self.maps):
                variant |= Variant.BY_PAIR
        return variant

    def turn(self, to: MapRow, position: torch.Tensor) -> torch.Tensor | None:
        """Positions float64 [n, 1 or pairs] by which states written at ``position`` int64 [n] turn; None for none."""
        return None if to == self.base else to(position) - self.base(position)
