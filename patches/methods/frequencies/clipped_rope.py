"""Clipped RoPE: the slowest pairs slowed down to a stop, softly or at once.

arXiv:2602.05258 (CoPE; not Contextual Position Encoding, which shares the name); code in hrlics/CoPE. The mask
applies to the frequencies of the base schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import WrappingMethod
from patches.encoding.recipe import Recipe
from patches.encoding.schedule import Frequencies, WrappingSchedule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ClippedSchedule(WrappingSchedule):
    """The last ``n`` frequencies of another schedule times (1 + cos x) / 2, x from 0 to pi; ``hard``: times 0."""

    n: int
    hard: bool

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        inv_freq, attention_factor, rope_theta = self.schedule.frequencies(geometry, length, dtype)
        kept = torch.ones(len(inv_freq), dtype=torch.float64)
        if self.hard:
            kept[-self.n :] = 0.0
        else:
            kept[-self.n :] = (1 + torch.linspace(0, math.pi, self.n, dtype=torch.float64).cos()) / 2
        return Frequencies((inv_freq * kept).to(dtype), attention_factor, rope_theta)


class ClippedRope(WrappingMethod):
    summary: ClassVar[str] = "Clipped RoPE (CoPE): the slowest pairs of any schedule stop rotating."
    use: ClassVar[str] = "Models tuned with it; elsewhere finding out what the slow pairs do."
    avoid: ClassVar[str] = "Expecting an extension without tuning."
    reach: ClassVar[str] = "that of the schedule underneath"
    evidence: ClassVar[str] = (
        "Its gains are reported for Llama-3-8B after continued pre-training at 64k (arXiv:2602.05258)."
    )
    formula: ClassVar[str] = (
        "theta_i' = theta_i (1 + cos x_i)/2 for the last pairs (parameter n), x from 0 to pi; hard: 0"
    )
    paper: ClassVar[str] = "Clipped RoPE, arXiv:2602.05258"
    training_free: ClassVar[str] = "Not made for it; slow pairs are said to matter little at inference."

    method: Literal["clipped_rope"] = "clipped_rope"
    n: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = Field(
        None, description="Number of slowest pairs; 20 when absent, or all of a model that has fewer."
    )
    hard: bool = Field(
        False, strict=True, description="Stop all n pairs; otherwise they fade from the first to the last."
    )

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        recipe, n = self.on_base(geometry), self.clipped(geometry)
        assert recipe.schedule is not None  # on_base refuses what rotates nothing
        return replace(recipe, schedule=ClippedSchedule(recipe.schedule, n, self.hard))

    def clipped(self, geometry: RopeGeometry) -> int:
        """Number of clipped pairs in this model.

        Raises:
            ValueError: for more pairs than it has, or for a soft clip of one, which would change nothing.
        """
        pairs = geometry.rotary_dim // 2
        n = self.n or min(20, pairs)
        if n > pairs:
            raise ValueError(f"n: this model has {pairs} rotary pairs, so at most {pairs} can be clipped, not {n}")
        if n == 1 and not self.hard:
            raise ValueError("n: at least 2 unless hard is true, as the first of them keeps its frequency")
        return n

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"n": self.clipped(geometry)}
