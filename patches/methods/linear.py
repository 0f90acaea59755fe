"""Linear position interpolation: every frequency divided by the factor.

Chen et al., arXiv:2306.15595, equation 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from patches.method import Factor, FrequencyMethod
from patches.recipe import Frequencies, Recipe, RopeGeometry
from patches.rotary import base_inv_freq


@dataclass(frozen=True)
class LinearSchedule:
    rope_theta: float
    factor: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int) -> Frequencies:
        inv_freq = base_inv_freq(self.rope_theta, geometry.rotary_dim) / self.factor
        return Frequencies(inv_freq, 1.0, self.rope_theta)


class Linear(FrequencyMethod):
    summary: ClassVar[str] = "Position interpolation: squeezes all positions into the trained range."
    paper: ClassVar[str] = "Position Interpolation, arXiv:2306.15595"
    training_free: ClassVar[str] = "Costs perplexity at every length without fine-tuning, more with the factor."
    cost: ClassVar[str] = "none"

    method: Literal["linear"] = "linear"
    factor: Factor = Field(description="Target length divided by the trained length.")

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(LinearSchedule(self.theta(geometry), self.factor))
