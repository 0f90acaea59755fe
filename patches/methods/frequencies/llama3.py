"""Llama 3.1 frequency scaling: interpolate long wavelengths, keep short ones, blend in between.

Llama 3 report, arXiv:2407.21783; formula from Meta's release (``apply_scaling``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.fields import Factor, Turns
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import TrainedLengthMethod
from patches.encoding.recipe import Recipe
from patches.encoding.rotary import base_inv_freq
from patches.encoding.schedule import Frequencies, RopeType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Llama3Schedule:
    rope_theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_length: int
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        plain = base_inv_freq(self.rope_theta, geometry.rotary_dim, dtype)
        wavelength = 2 * math.pi / plain
        between = self.high_freq_factor - self.low_freq_factor or 1.0  # equal ends (Llama 4 Scout): no pair is between
        blend = (self.trained_length / wavelength - self.low_freq_factor) / between
        smoothed = (1 - blend) * plain / self.factor + blend * plain
        inv_freq = torch.where(wavelength > self.trained_length / self.low_freq_factor, plain / self.factor, smoothed)
        inv_freq = torch.where(wavelength < self.trained_length / self.high_freq_factor, plain, inv_freq)
        return Frequencies(inv_freq, 1.0, self.rope_theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        return {
            "rope_type": RopeType.LLAMA3,
            "rope_theta": self.rope_theta,
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.trained_length,
        }


class Llama3(TrainedLengthMethod):
    summary: ClassVar[str] = "Llama 3.1's schedule: divides long wavelengths by the factor, keeps short ones."
    use: ClassVar[str] = "Llama 3.1 and later checkpoints, which were trained with it."
    avoid: ClassVar[str] = "Expecting a temperature: it has none."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = "Ships in Llama 3.1 (8k to 128k) and 3.2 (arXiv:2407.21783)."
    formula: ClassVar[str] = "theta_i / s below low turns, theta_i above high turns, linear in turns between"
    paper: ClassVar[str] = "Llama 3, arXiv:2407.21783"
    training_free: ClassVar[str] = "Ships with tuned checkpoints; usable as a schedule on others."
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["llama3"] = "llama3"
    factor: Factor = Field(8.0, description="Division of the long wavelengths.")
    low_freq_factor: Turns = Field(1.0, description="Turns below which a pair is divided.")
    high_freq_factor: Turns = Field(4.0, description="Turns above which a pair is kept.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError("high_freq_factor must not be below low_freq_factor")
        return self

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        schedule = Llama3Schedule(
            self.theta(geometry),
            self.factor,
            self.low_freq_factor,
            self.high_freq_factor,
            self.trained_length(geometry),
        )
        return Recipe(schedule)
