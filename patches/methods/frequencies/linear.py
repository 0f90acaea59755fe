"""Linear position interpolation: every frequency divided by the factor, fixed or by the request's length.

Chen et al., arXiv:2306.15595, equation 4. The dynamic form uses the request's reserved length, fixed
at admission, so that all its keys agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from patches.encoding.fields import Factor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import FrequencyMethod, TrainedLengthMethod
from patches.encoding.recipe import Recipe
from patches.encoding.rotary import base_inv_freq
from patches.encoding.schedule import Frequencies, RopeType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LinearSchedule:
    rope_theta: float
    factor: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        inv_freq = base_inv_freq(self.rope_theta, geometry.rotary_dim, dtype) / self.factor
        return Frequencies(inv_freq, 1.0, self.rope_theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        return {"rope_type": RopeType.LINEAR, "rope_theta": self.rope_theta, "factor": self.factor}


@dataclass(frozen=True)
class DynamicLinearSchedule:
    """Factor n / L0 for n = max(reserved length, L0)."""

    rope_theta: float
    trained_length: int
    depends_on_length: bool = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        return self._at(length).frequencies(geometry, length, dtype)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        return self._at(length).rope_parameters(geometry, length)

    def _at(self, length: int) -> LinearSchedule:
        return LinearSchedule(self.rope_theta, max(1.0, length / self.trained_length))


class Linear(FrequencyMethod):
    also: ClassVar[tuple[str, ...]] = ("pi", "position_interpolation")
    summary: ClassVar[str] = "Position interpolation: squeezes all positions into the trained range."
    use: ClassVar[str] = "Checkpoints fine-tuned with it, at their own factor."
    avoid: ClassVar[str] = "Untuned use at factors above 2."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = (
        "LLaMA-7B to 8k: perplexity 16.1 untuned, 7.12 after 200 steps (arXiv:2306.15595, table 5)."
    )
    formula: ClassVar[str] = "theta_i' = theta_i / s"
    paper: ClassVar[str] = "Position Interpolation, arXiv:2306.15595"
    training_free: ClassVar[str] = "Costs perplexity at every length without fine-tuning, more with the factor."
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["linear"] = "linear"
    factor: Factor = Field(description="Target length divided by the trained length.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(LinearSchedule(self.theta(geometry), self.factor))


class DynamicLinear(TrainedLengthMethod):
    summary: ClassVar[str] = "Position interpolation by just as much as the request's own reserved length needs."
    use: ClassVar[str] = "Mixed traffic on a model that was not tuned: short requests are untouched."
    avoid: ClassVar[str] = "Models tuned to one factor: give them linear with that factor."
    reach: ClassVar[str] = "about 2 x L0"
    evidence: ClassVar[str] = (
        "Llama-2-7B, PG19 untuned: 9.19 at 8k, 15.1 at 16k, over 100 at 32k (arXiv:2402.17463, table 1)."
    )
    formula: ClassVar[str] = "theta_i' = theta_i / max(1, n/L0), n the reserved length"
    paper: ClassVar[str] = "Position Interpolation, arXiv:2306.15595; dynamic form YaRN arXiv:2309.00071 section 3.3"
    training_free: ClassVar[str] = (
        "Leaves short requests untouched; past the trained length it costs what linear costs."
    )
    cost: ClassVar[str] = "none; perplexity curves take one pass per length"

    method: Literal["dynamic_linear"] = "dynamic_linear"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(DynamicLinearSchedule(self.theta(geometry), self.trained_length(geometry)))
