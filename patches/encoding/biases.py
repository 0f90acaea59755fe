"""Score biases with a short form: linear, logarithmic, a power, or one value per bucket of distances.

Kernels compute these from a few numbers per head. Any other bias by distance gets a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LinearBias:
    """-slope x distance per head, times ``scale``.

    ``in_bfloat16``: slope x key position, with both and their product rounded, as Falcon's released code has it.
    """

    slopes: tuple[float, ...]
    scale: float = 1.0
    in_bfloat16: bool = False

    @property
    def by_distance(self) -> bool:
        return not self.in_bfloat16

    def of_heads(self, heads: slice) -> LinearBias:
        return replace(self, slopes=self.slopes[heads])

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        import torch

        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=q_idx.device)[:, None, None]
        if self.in_bfloat16:
            bias = (slopes.bfloat16() * kv_idx).float().expand(-1, len(q_idx), -1)
        else:
            bias = slopes * (kv_idx - q_idx).float()
        return bias * self.scale


@dataclass(frozen=True)
class _TwoPerHead:
    """One ``r1`` and ``r2`` per head."""

    r1: tuple[float, ...]
    r2: tuple[float, ...]

    @property
    def by_distance(self) -> bool:
        return True

    def of_heads(self, heads: slice) -> Self:
        return type(self)(self.r1[heads], self.r2[heads])

    def _for(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """r1 and r2 float32 [heads, 1, 1], and the distances, 0 for keys behind a query."""
        import torch

        r1, r2 = (torch.tensor(r, dtype=torch.float32, device=q_idx.device)[:, None, None] for r in (self.r1, self.r2))
        return r1, r2, (q_idx - kv_idx).clamp_min(0).float()


@dataclass(frozen=True)
class LogBias(_TwoPerHead):
    """-r1 ln(1 + r2 distance)."""

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        r1, r2, distance = self._for(q_idx, kv_idx)
        return -r1 * (r2 * distance).log1p()


@dataclass(frozen=True)
class PowerBias(_TwoPerHead):
    """-r1 distance^r2."""

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        r1, r2, distance = self._for(q_idx, kv_idx)
        return -r1 * distance**r2


def t5_buckets(distance: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket int64 of every distance int64 >= 0, in float32 as released: at a bucket's edge rounding decides."""
    import torch

    exact = num_buckets // 2
    ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp_max(num_buckets - 1))


@dataclass(frozen=True)
class BucketBias:
    """``table`` [num_buckets][heads], looked up by the distance's bucket."""

    table: tuple[tuple[float, ...], ...]
    max_distance: int

    @property
    def by_distance(self) -> bool:
        return True

    def __hash__(self) -> int:
        """Of a part: hashing all numbers takes longer than computing biases from them."""
        return hash((self.table[0], len(self.table), self.max_distance))

    def of_heads(self, heads: slice) -> BucketBias:
        return BucketBias(tuple(row[heads] for row in self.table), self.max_distance)

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        buckets = t5_buckets((q_idx - kv_idx).clamp_min(0), len(self.table), self.max_distance)
        return self._by_head.to(q_idx.device)[:, buckets]

    @cached_property
    def _by_head(self) -> torch.Tensor:
        """float32 [heads, num_buckets]; a large table takes milliseconds to make, and every layer asks for it."""
        import torch

        return torch.tensor(self.table, dtype=torch.float32).T
