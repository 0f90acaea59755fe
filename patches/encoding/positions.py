"""Position maps that methods share: positions int64 [n] to the positions used as rotation angles.

Whole division and remainders stay int64, so that an effective distance is exact; only ``Stretched`` is fractional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fixed:
    """The same position for every token."""

    position: int

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position.new_full(position.shape, self.position)


@dataclass(frozen=True)
class Shifted:
    """position + shift."""

    shift: int

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position + self.shift


@dataclass(frozen=True)
class Capped:
    """min(position, last)."""

    last: int

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position.clamp_max(self.last)


@dataclass(frozen=True)
class Grouped:
    """position // group_size + shift."""

    group_size: int
    shift: int = 0

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position // self.group_size + self.shift


@dataclass(frozen=True)
class GroupedPairs:
    """position // group_size + shift, each rotary pair with its own: [n] -> [n, pairs]."""

    group_sizes: tuple[int, ...]
    shifts: tuple[int, ...]

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        sizes, shifts = position.new_tensor(self.group_sizes), position.new_tensor(self.shifts)
        return position[:, None] // sizes + shifts


@dataclass(frozen=True)
class Stretched:
    """(position + shift) / divisor, float64."""

    divisor: float
    shift: float = 0.0

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return (position.double() + self.shift) / self.divisor


@dataclass(frozen=True)
class InChunk:
    """position % size + shift, ``last`` at most when given."""

    size: int
    shift: int = 0
    last: int | None = None

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        inside = position % self.size + self.shift
        return inside if self.last is None else inside.clamp_max(self.last)


NO_LIMIT = 1 << 30
"""No limit: more than any position, and exact in float32."""


@dataclass(frozen=True)
class MapRow:
    """min((position % period) // group + shift, cap) / divisor.

    ``groups`` and ``shifts`` have one number, or one per rotary pair.
    """

    period: int = NO_LIMIT
    groups: tuple[int, ...] = (1,)
    shifts: tuple[float, ...] = (0.0,)
    cap: int = NO_LIMIT
    divisor: float = 1.0

    @property
    def is_by_pair(self) -> bool:
        return len(self.groups) > 1

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        """Positions int64 [n] -> float64 [n, 1 or pairs]."""
        import torch

        groups = torch.tensor(self.groups, device=position.device)
        shifts = torch.tensor(self.shifts, dtype=torch.float64, device=position.device)
        grouped = position[:, None] % self.period // groups
        return (grouped + shifts).clamp_max(self.cap) / self.divisor


AS_IT_IS = MapRow()


def grouped_reach(trained: int, window: int, group_size: int) -> int:
    """Longest length whose distances, in groups from ``window`` on, all stay below ``trained`` tokens."""
    return max(trained, (trained - window + window // group_size) * group_size)
