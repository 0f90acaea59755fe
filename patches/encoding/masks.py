"""Predicates on (q_idx, kv_idx): the pairs that a band covers, and the keys that a block of queries can reach.

Calling a predicate broadcasts the two index tensors to a boolean tensor. ``key_range`` bounds the
keys that a block of queries can reach, so that attention skips the rest without building a mask.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Predicate(Protocol):
    @property
    def most_keys(self) -> int:
        """Most keys that one query covers; ``UNBOUNDED`` if they grow with its position."""
        ...

    @property
    def by_distance(self) -> bool:
        """True if distance alone decides: blocks of queries at other positions then share their masks."""
        ...

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor: ...

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        """Half-open range of key indices that queries q_low..q_high (inclusive) can reach.

        With the two swapped, that of the keys which every one of these queries covers. Empty ranges start at their end.
        """
        ...


UNBOUNDED = sys.maxsize


class LayerMask(Predicate, Protocol):
    """The mask of a layer, whatever the encoding: a sliding window or a chunk."""

    def __hash__(self) -> int: ...

    def is_causal_below(self, length: int) -> bool:
        """True if it excludes no causal pair of the first ``length`` tokens."""
        ...


@dataclass(frozen=True)
class DistanceRange:
    """Causal pairs at a distance low <= q_idx - kv_idx < high; ``high`` None is unbounded."""

    low: int = 0
    high: int | None = None

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError("low must be at least 0: a key after its query is never attended")

    @property
    def most_keys(self) -> int:
        return UNBOUNDED if self.high is None else self.high - self.low

    @property
    def by_distance(self) -> bool:
        return True

    def is_causal_below(self, length: int) -> bool:
        return self.low == 0 and (self.high is None or self.high >= length)

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

    @property
    def most_keys(self) -> int:
        return min(self.left.most_keys, self.right.most_keys)

    @property
    def by_distance(self) -> bool:
        return self.left.by_distance and self.right.by_distance

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return self.left(q_idx, kv_idx) & self.right(q_idx, kv_idx)

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        first_left, last_left = self.left.key_range(q_low, q_high)
        first_right, last_right = self.right.key_range(q_low, q_high)
        first = max(first_left, first_right)
        return first, max(first, min(last_left, last_right))


@dataclass(frozen=True)
class FirstKeys:
    """Causal pairs whose key is among the first ``count`` tokens (attention sinks), ``low`` or more away."""

    count: int
    low: int = 0

    @property
    def most_keys(self) -> int:
        return self.count

    @property
    def by_distance(self) -> bool:
        return False

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (kv_idx < self.count) & (q_idx - kv_idx >= self.low)

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        return 0, max(0, min(self.count, q_high - self.low + 1))


@dataclass(frozen=True)
class ChunkRange:
    """Causal pairs whose chunks lie low <= q_idx // size - kv_idx // size < high apart; None is unbounded."""

    size: int
    low: int = 0
    high: int | None = None

    @property
    def most_keys(self) -> int:
        return UNBOUNDED if self.high is None else (self.high - self.low) * self.size

    @property
    def by_distance(self) -> bool:
        return False

    def is_causal_below(self, length: int) -> bool:
        return self.low == 0 and (self.high is None or self.high * self.size >= length)

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        apart = q_idx // self.size - kv_idx // self.size
        inside = (apart >= self.low) & (kv_idx <= q_idx)
        return inside if self.high is None else inside & (apart < self.high)

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        first = 0 if self.high is None else max(0, q_low // self.size - self.high + 1) * self.size
        last = min(q_high, (q_high // self.size - self.low + 1) * self.size - 1)
        return first, max(first, last + 1)


@dataclass(frozen=True)
class EveryPair:
    """All pairs, later keys included: the layer's own mask decides."""

    @property
    def most_keys(self) -> int:
        return UNBOUNDED

    @property
    def by_distance(self) -> bool:
        return True

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (q_idx - kv_idx).abs() >= 0

    def key_range(self, q_low: int, q_high: int) -> tuple[int, int]:
        return 0, UNBOUNDED


CAUSAL = DistanceRange()
EVERY_PAIR = EveryPair()


def merged(predicates: list[Predicate]) -> list[Predicate]:
    """``predicates``, with adjacent ranges merged, for layers in which bands do not differ otherwise."""
    result: list[Predicate] = []
    for predicate in predicates:
        last = result[-1] if result else None
        if isinstance(last, DistanceRange) and isinstance(predicate, DistanceRange) and last.high == predicate.low:
            result[-1] = DistanceRange(last.low, predicate.high)
        elif isinstance(last, ChunkRange) and isinstance(predicate, ChunkRange) and last.high == predicate.low:
            result[-1] = ChunkRange(last.size, last.low, predicate.high)
        else:
            result.append(predicate)
    return [CAUSAL if predicate == ChunkRange(getattr(predicate, "size", 0)) else predicate for predicate in result]
