"""Predicates on (q_idx, kv_idx): which pairs a band covers, and which keys a query block can reach.

Calling a predicate broadcasts the two index tensors to a boolean tensor. ``key_range`` bounds the
keys that a block of queries can reach, so that attention skips the rest without building a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Predicate(Protocol):
    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor: ...

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        """Half-open range of key indices that queries q_low..q_high (inclusive) can reach."""
        ...


@dataclass(frozen=True)
class DistanceRange:
    """Causal pairs at a distance low <= q_idx - kv_idx < high; ``high`` None is unbounded."""

    low: int = 0
    high: int | None = None

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError("low must be at least 0: a key after its query is never attended")

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        distance = q_idx - kv_idx
        inside = distance >= self.low
        return inside if self.high is None else inside & (distance < self.high)

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        first = 0 if self.high is None else max(0, q_low - self.high + 1)
        return first, max(first, q_high - self.low + 1)


@dataclass(frozen=True)
class And:
    """Pairs that both predicates cover."""

    left: Predicate
    right: Predicate

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return self.left(q_idx, kv_idx) & self.right(q_idx, kv_idx)

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        first_left, last_left = self.left.key_range(q_low, q_high)
        first_right, last_right = self.right.key_range(q_low, q_high)
        first = max(first_left, first_right)
        return first, max(first, min(last_left, last_right))


CAUSAL = DistanceRange()
