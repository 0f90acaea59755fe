"""Su's NTK-RoPE variants: scaling spread over all pairs, the first one included.

Su 2023, kexue.fm/archives/9948, "NTK-RoPE-fixed" and "NTK-RoPE-mixed"; code in bojone/rerope,
``ntk_patch.py``, which also multiplies scores by log-n: here that is ``attention_temperature``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from patches.encoding.fields import Factor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import FrequencyMethod
from patches.encoding.recipe import Recipe
from patches.encoding.rotary import base_inv_freq
from patches.encoding.schedule import Frequencies

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MixedNtkSchedule:
    """Pair i is divided by exp(a (i + 1)^b) with a = ln(factor) / (d / 2)^b."""

    rope_theta: float
    factor: float
    b: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        plain = base_inv_freq(self.rope_theta, geometry.rotary_dim, dtype)
        share = torch.arange(1, len(plain) + 1, dtype=torch.float64) / len(plain)
        return Frequencies((plain * self.factor ** -(share**self.b)).to(dtype), 1.0, self.rope_theta)


class NtkFixed(FrequencyMethod):
    summary: ClassVar[str] = "NTK-RoPE-fixed: like NTK-aware, with the first pair scaled a little as well."
    use: ClassVar[str] = "Untuned extension by a moderate factor, as an alternative to ntk."
    avoid: ClassVar[str] = "Taking the factor for the length ratio: middle pairs stretch by less."
    reach: ClassVar[str] = "factor/4 to factor/2 x L0, as for ntk"
    evidence: ClassVar[str] = (
        "Its author's 100M model, trained at 512, read at 4096: next-token accuracy 39.61 %, ntk 39.27 %, "
        "linear 13.54 % (kexue.fm/archives/9948)."
    )
    formula: ClassVar[str] = "theta_i' = theta_i s^(-2(i+1)/d)"
    paper: ClassVar[str] = "Su 2023, kexue.fm/archives/9948"
    training_free: ClassVar[str] = "Made for use without tuning; close to ntk."
    multiples: ClassVar[tuple[float, ...]] = (2.0,)

    method: Literal["ntk_fixed"] = "ntk_fixed"
    factor: Factor = Field(description="Division of the lowest frequency.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(MixedNtkSchedule(self.theta(geometry), self.factor, 1.0))


class NtkMixed(FrequencyMethod):
    summary: ClassVar[str] = "NTK-RoPE-mixed: fast pairs scaled more than by NTK-aware, on the way to linear."
    use: ClassVar[str] = "Untuned extension by a moderate factor, best with attention_temperature log_n."
    avoid: ClassVar[str] = "Tasks that live on exact neighbours: it slows the fastest pairs too."
    reach: ClassVar[str] = "more than factor/2 x L0 and less than factor x L0"
    evidence: ClassVar[str] = (
        "Its author's 100M model, trained at 512, read at 4096: next-token accuracy 40.12 %, with log-n 42.38 %, "
        "ntk 39.27 % (kexue.fm/archives/9948)."
    )
    formula: ClassVar[str] = "theta_i' = theta_i exp(-a (i+1)^e), a = ln s / (d/2)^e, e the parameter b"
    paper: ClassVar[str] = "Su 2023, kexue.fm/archives/9948"
    training_free: ClassVar[str] = "Made for use without tuning; its author adds log-n scaling."
    multiples: ClassVar[tuple[float, ...]] = (1.0, 2.0)

    method: Literal["ntk_mixed"] = "ntk_mixed"
    factor: Factor = Field(description="Division of the lowest frequency.")
    b: Annotated[float, Field(ge=0.0, le=10.0, strict=True)] = Field(
        0.625, description="Exponent of the spread: 0 is linear, 1 is ntk_fixed (the author's later code: 0.75)."
    )

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(MixedNtkSchedule(self.theta(geometry), self.factor, self.b))
