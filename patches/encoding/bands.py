"""Bands: the pairs of query and key that a recipe rotates alike, and the positions that it rotates them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import CAUSAL, DistanceRange, FirstKeys, Predicate, merged

if TYPE_CHECKING:
    import torch


class PositionMap(Protocol):
    """Positions int64 [n] -> the positions used as rotation angles: [n], or [n, pairs] if they differ by pair."""

    def __hash__(self) -> int: ...

    def __call__(self, position: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Identity:
    """Every token keeps its own position."""

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position


IDENTITY = Identity()


@dataclass(frozen=True)
class Band:
    """Pairs of ``predicate``: the query is rotated by ``query_map`` and the key by ``key_map``."""

    query_map: PositionMap = IDENTITY
    key_map: PositionMap = IDENTITY
    predicate: Predicate = CAUSAL

    @property
    def keeps_positions(self) -> bool:
        return self.query_map == IDENTITY and self.key_map == IDENTITY


def refuse_without_effect(bands: Sequence[Band], geometry: RopeGeometry) -> None:
    """Raises:
    ValueError: for maps and masks that begin beyond the windows of the layers that they apply to.
    """
    masks = merged([band.predicate for band in bands]) != [CAUSAL]
    reach = geometry.widest if masks else geometry.window  # maps need rotation, masks apply everywhere
    if reach is None or bands == (Band(),):
        return
    near = [band for band in bands if _begins_at(band.predicate) < reach]
    ranges = [band.predicate for band in near if isinstance(band.predicate, DistanceRange)]
    if all(band.keeps_positions for band in near) and any(each.is_causal_below(reach) for each in ranges):
        begins = max(getattr(band.predicate, "high", None) or _begins_at(band.predicate) for band in bands)
        raise ValueError(
            f"its maps and masks have no effect on this model: they begin {begins} tokens away, and the layers attend "
            f"to {reach}. A start below {reach} has one"
        )


def _begins_at(predicate: Predicate) -> int:
    """A lower bound of the distances of its pairs, in tokens."""
    return predicate.low if isinstance(predicate, DistanceRange | FirstKeys) else 0
