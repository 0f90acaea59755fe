"""NTK-aware scaling: a larger base, so that low frequencies stretch and high ones stay.

bloc97 (static) and emozilla (dynamic), 2023; written up in YaRN, arXiv:2309.00071, section 3.1.
The dynamic form uses the request's reserved length, fixed at admission. It does not
use a length that grows while cached keys keep their old base.
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


def ntk_theta(rope_theta: float, scale: float, rotary_dim: int) -> float:
    """rope_theta x scale^(d / (d - 2)): the last pair is divided by exactly ``scale``.

    Raises:
        ValueError: for a rotary dimension of 2, which has only one frequency.
    """
    if rotary_dim <= 2:
        raise ValueError("method: NTK-aware scaling needs at least two rotary frequencies")
    return float(rope_theta * scale ** (rotary_dim / (rotary_dim - 2)))


@dataclass(frozen=True)
class NtkSchedule:
    rope_theta: float
    factor: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        theta = ntk_theta(self.rope_theta, self.factor, geometry.rotary_dim)
        return Frequencies(base_inv_freq(theta, geometry.rotary_dim, dtype), 1.0, theta)


@dataclass(frozen=True)
class DynamicNtkSchedule:
    """Scale factor x n / L0 - (factor - 1) for n = max(reserved length, L0)."""

    rope_theta: float
    factor: float
    trained_length: int
    depends_on_length: bool = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        n = max(length, self.trained_length)
        scale = self.factor * n / self.trained_length - (self.factor - 1)
        theta = ntk_theta(self.rope_theta, scale, geometry.rotary_dim)
        return Frequencies(base_inv_freq(theta, geometry.rotary_dim, dtype), 1.0, theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        return {
            "rope_type": RopeType.DYNAMIC,
            "rope_theta": self.rope_theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.trained_length,
        }


class Ntk(FrequencyMethod):
    also: ClassVar[tuple[str, ...]] = ("ntk_aware", "abf", "adjusted_base_frequency")
    summary: ClassVar[str] = "NTK-aware: raises the base so that only low frequencies are interpolated."
    use: ClassVar[str] = "Untuned extension by a moderate factor."
    avoid: ClassVar[str] = "Taking the factor for the length ratio: it serves a quarter to half of it."
    reach: ClassVar[str] = "factor/4 to factor/2 x L0"
    evidence: ClassVar[str] = (
        "Llama-2-7B tuned to 8k: 3.59 at 8192 against 3.34 for interpolation (arXiv:2309.00071, table 1)."
    )
    formula: ClassVar[str] = "b' = b s^(d/(d-2))"
    paper: ClassVar[str] = "bloc97 2023; YaRN arXiv:2309.00071 section 3.1"
    training_free: ClassVar[str] = "Works without tuning up to a quarter of its factor, at short lengths up to half."
    multiples: ClassVar[tuple[float, ...]] = (1.0, 2.0)

    method: Literal["ntk"] = "ntk"
    factor: Factor = Field(
        description="Division of the lowest frequency; serves factor/4 to factor/2 times the length."
    )

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(NtkSchedule(self.theta(geometry), self.factor))


class DynamicNtk(TrainedLengthMethod):
    also: ClassVar[tuple[str, ...]] = ("dynamic_ntk", "ntk_dynamic", "dynamic_ntk_aware")
    summary: ClassVar[str] = "NTK-aware with the base chosen from the request's own reserved length."
    use: ClassVar[str] = "Mixed traffic: short requests are untouched, long ones stretch as they need."
    avoid: ClassVar[str] = "Lengths beyond four times L0."
    reach: ClassVar[str] = "about 2 to 4 x L0"
    evidence: ClassVar[str] = "Llama-2-7B, PG19 untuned: 11.98 at 8k, 26.1 at 16k (arXiv:2402.17463, table 1)."
    formula: ClassVar[str] = "b' = b (s n/L0 - (s - 1))^(d/(d-2)), n the reserved length"
    paper: ClassVar[str] = "emozilla 2023; YaRN arXiv:2309.00071 section 3.3"
    training_free: ClassVar[str] = "Leaves short requests untouched; good without tuning at moderate lengths."
    cost: ClassVar[str] = "none; perplexity curves take one pass per length"

    method: Literal["dynamic"] = "dynamic"
    factor: Factor = Field(1.0, description="1 scales by length / trained length; larger leaves headroom.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        schedule = DynamicNtkSchedule(self.theta(geometry), self.factor, self.trained_length(geometry))
        return Recipe(schedule)

    def reached(self, geometry: RopeGeometry) -> int | None:
        return None  # the base follows the length, whatever the factor
