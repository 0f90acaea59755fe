"""Self-Extend: exact positions for neighbours, grouped positions for everything further away.

Jin et al., arXiv:2401.01325, section 3.2. The shift of the grouped queries uses whole division in
both terms, as in the authors' corrected code: a fractional shift misplaces the seam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from patches.masks import DistanceRange
from patches.method import TrainedLengthMethod
from patches.recipe import Band, Recipe, RopeGeometry
from patches.schedule import UnscaledSchedule
from patches.temperature import LogLengthTemperature


@dataclass(frozen=True)
class Grouped:
    """position // group_size + shift."""

    group_size: int
    shift: int = 0

    def __call__(self, position: torch.Tensor) -> torch.Tensor:
        return position // self.group_size + self.shift


class SelfExtend(TrainedLengthMethod):
    summary: ClassVar[str] = "Self-Extend: neighbours keep exact positions, distant tokens share grouped ones."
    paper: ClassVar[str] = "Self-Extend, arXiv:2401.01325"
    training_free: ClassVar[str] = "Works without tuning up to (trained length - window) x group + window."
    cost: ClassVar[str] = "keys are rotated when read; prefill runs two attentions over disjoint pairs"
    rotates_at: ClassVar[str] = "cache_read"

    method: Literal["self_extend"] = "self_extend"
    group_size: Annotated[int, Field(ge=1, le=4096, strict=True)] = Field(
        8, description="Positions that share one grouped one."
    )
    neighbor_window: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] | None = Field(
        None, description="Distance below which positions stay exact; a quarter of the trained length when absent."
    )
    log_n: bool = Field(
        False, strict=True, description="Scale the scores of query p by max(1, ln(p + 1) / ln(trained length))."
    )

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        trained_length, window, group = self.trained_length(geometry), self.window(geometry), self.group_size
        near = Band(predicate=DistanceRange(0, window))
        far = Band(Grouped(group, window - window // group), Grouped(group), DistanceRange(window))
        return Recipe(
            schedule=UnscaledSchedule(self.theta(geometry)),
            bands=(near, far),
            attention_temperature=LogLengthTemperature(trained_length) if self.log_n else None,
        )

    def window(self, geometry: RopeGeometry) -> int:
        return self.neighbor_window or max(1, self.trained_length(geometry) // 4)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"neighbor_window": self.window(geometry)}
