"""MrRoPE and TailSpline: YaRN's range of pairs, scaled geometrically instead of blended.

MrRoPE, arXiv:2601.22181 (uniform and progressive); TailSpline is an unreviewed draft of 2026. A pair
that lies k of n steps into the range is divided by factor^e(k, n). Each method is one exponent e.
YaRN's factor on cos and sin stays, as in MrRoPE's released code.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from patches.encoding.fields import Factor, YarnFactor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.ramps import TurnRange, TurnRangeMethod, mscale
from patches.encoding.recipe import Recipe
from patches.encoding.rotary import base_inv_freq
from patches.encoding.schedule import Frequencies

if TYPE_CHECKING:
    import torch


STEPS = (
    "t = clip(i - low, 0, m), m = high - low. Pairs low and high make beta_fast and beta_slow turns in L0; cos and sin "
    "as in yarn."
)
"""The symbols of all three formulas; n is the reserved length there, and k a key."""


@dataclass(frozen=True)
class RadixSchedule:
    """Divides pair i by factor^exponent(k, n), with k its steps into the range and n the range's width."""

    range: TurnRange
    factor: float
    attention_factor: float
    depends_on_length: bool = False

    @abstractmethod
    def exponent(self, k: torch.Tensor, n: float) -> torch.Tensor:
        """Rises from 0 at k = 0 to 1 at k = n."""

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        low, high = self.range.pairs(geometry.rotary_dim)
        plain = base_inv_freq(self.range.rope_theta, geometry.rotary_dim, dtype)
        n = max(high - low, 0.001)  # without any pair between, the released code steps from one to the other
        k = (torch.arange(len(plain), dtype=torch.float64) - low).clamp(0, n)
        inv_freq = (plain * self.factor ** -self.exponent(k, n)).to(dtype)
        return Frequencies(inv_freq, self.attention_factor, self.range.rope_theta)


@dataclass(frozen=True)
class UniformSchedule(RadixSchedule):
    def exponent(self, k: torch.Tensor, n: float) -> torch.Tensor:
        return k / n


@dataclass(frozen=True)
class ProgressiveSchedule(RadixSchedule):
    def exponent(self, k: torch.Tensor, n: float) -> torch.Tensor:
        return k * (k + 1) / (n * (n + 1))


@dataclass(frozen=True)
class TailSplineSchedule(RadixSchedule):
    def exponent(self, k: torch.Tensor, n: float) -> torch.Tensor:
        return k * (3 * n**2 + 3 * n + 1 - k**2) / (n * (n + 1) * (2 * n + 1))


class RadixMethod(TurnRangeMethod):
    """Shared part of the three: their fields, and all of the schedule but its class."""

    schedule: ClassVar[type[RadixSchedule]]

    factor: Factor = Field(description="Target length divided by the trained length.")
    attention_factor: YarnFactor = None

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        factor = self.attention_factor or mscale(self.factor)
        return Recipe(self.schedule(self.turn_range(geometry), self.factor, factor))


class MrRopeUniform(RadixMethod):
    summary: ClassVar[str] = "MrRoPE-Uni: across the middle pairs the division grows by the same ratio per pair."
    use: ClassVar[str] = "Untuned extension, as the plainest form of mrrope_pro."
    avoid: ClassVar[str] = "Checkpoints that were tuned to another schedule."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = "None cited here for this variant: the released tables are of mrrope_pro."
    formula: ClassVar[str] = f"theta_i' = theta_i s^(-t/m), {STEPS}"
    paper: ClassVar[str] = "MrRoPE, arXiv:2601.22181"
    training_free: ClassVar[str] = "Made for use without tuning."
    schedule: ClassVar[type[RadixSchedule]] = UniformSchedule
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["mrrope_uni"] = "mrrope_uni"


class MrRopeProgressive(RadixMethod):
    summary: ClassVar[str] = "MrRoPE-Pro: across the middle pairs the division grows by a rising ratio per pair."
    use: ClassVar[str] = "Untuned extension, in place of yarn."
    avoid: ClassVar[str] = "Checkpoints that were tuned to another schedule; inputs that fit L0."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = (
        "Llama-2-7B-chat untuned, factor 10, proof-pile: 5.00 at 8k and 3.67 at 32k; yarn 5.05 and 3.81 "
        "(tables of the authors' repository)."
    )
    formula: ClassVar[str] = f"theta_i' = theta_i s^(-t(t+1)/(m(m+1))), {STEPS}"
    paper: ClassVar[str] = "MrRoPE, arXiv:2601.22181"
    training_free: ClassVar[str] = (
        "Made for use without tuning. From twice the trained length on, it is a little better than yarn. Within the "
        "trained length, it is a little worse."
    )
    schedule: ClassVar[type[RadixSchedule]] = ProgressiveSchedule
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["mrrope_pro"] = "mrrope_pro"


class TailSpline(RadixMethod):
    summary: ClassVar[str] = "TailSpline: MrRoPE with a cubic exponent, which eases into the fully divided pairs."
    use: ClassVar[str] = "Untuned extension, to compare with mrrope_pro."
    avoid: ClassVar[str] = "Relying on it: only its author has reported on it."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = (
        "RULER at 64k, Kanana-8B: 72.65, mrrope_pro 70.33, yarn 65.64 (the draft's own figures, unreviewed)."
    )
    formula: ClassVar[str] = f"theta_i' = theta_i s^(-t(3m^2 + 3m + 1 - t^2)/(m(m+1)(2m+1))), {STEPS}"
    paper: ClassVar[str] = "TailSpline, unreviewed draft 2026"
    training_free: ClassVar[str] = "Made for use without tuning; on the evidence of a single model."
    schedule: ClassVar[type[RadixSchedule]] = TailSplineSchedule
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["tailspline"] = "tailspline"
