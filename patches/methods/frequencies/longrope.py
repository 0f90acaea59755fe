"""LongRoPE: one searched divisor per pair, a short list up to the trained length and a long one past it.

Ding et al., arXiv:2402.13753. The request's reserved length chooses the list, at admission. The factor on cos and sin
applies with both lists, as in the released code and transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.fields import AttentionFactor, Factor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import TrainedLengthMethod
from patches.encoding.recipe import Recipe
from patches.encoding.schedule import Frequencies, RopeType

if TYPE_CHECKING:
    import torch

Divisors = Annotated[
    tuple[Annotated[float, Field(ge=1e-6, le=1e6, strict=True)], ...], Field(min_length=1, max_length=1024)
]


@dataclass(frozen=True)
class LongRopeSchedule:
    rope_theta: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    trained_length: int
    short_scale: float
    long_scale: float
    depends_on_length: bool = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        is_long = length > self.trained_length
        divisors = torch.tensor(self.long_factor if is_long else self.short_factor, dtype=dtype)
        exponent = torch.arange(0, geometry.rotary_dim, 2, dtype=dtype) / geometry.rotary_dim
        inv_freq = 1.0 / (divisors * self.rope_theta**exponent)
        return Frequencies(inv_freq, self.long_scale if is_long else self.short_scale, self.rope_theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any] | None:
        if self.short_scale != self.long_scale:  # they have one factor for any length
            return None
        return {
            "rope_type": RopeType.LONGROPE,
            "rope_theta": self.rope_theta,
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
            "attention_factor": self.short_scale,
            "original_max_position_embeddings": self.trained_length,
        }


class LongRope(TrainedLengthMethod):
    also: ClassVar[tuple[str, ...]] = ("su", "longrope2", "phi3")
    summary: ClassVar[str] = "LongRoPE: a searched divisor for every pair, short or long by the request's length."
    use: ClassVar[str] = "Checkpoints with searched lists (Phi-3, Phi-4-mini, MiniCPM)."
    avoid: ClassVar[str] = "Made-up lists: the search is the method."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = "LLaMA2 tuned at 256k: Books3 6.81 at 8k to 7.08 at 2048k (arXiv:2402.13753)."
    formula: ClassVar[str] = "theta_i' = theta_i / e_i, e the list; cos and sin x sqrt(1 + ln s / ln L0)"
    paper: ClassVar[str] = "LongRoPE, arXiv:2402.13753"
    training_free: ClassVar[str] = (
        "For checkpoints that ship the lists (Phi-3, MiniCPM), or with lists that `search` found."
    )
    cost: ClassVar[str] = "none; perplexity curves take one pass per length"

    method: Literal["longrope"] = "longrope"
    short_factor: Divisors = Field(description="Divisor per pair up to the trained length.")
    long_factor: Divisors = Field(description="Divisor per pair past the trained length.")
    factor: Factor | None = Field(
        None, description="Extension ratio behind the attention factor; max / trained length when absent."
    )
    attention_factor: AttentionFactor | None = Field(
        None, description="Multiplies cos and sin; sqrt(1 + ln(factor) / ln(trained length)) when absent."
    )

    short_mscale: AttentionFactor | None = Field(
        None, description="Multiplies cos and sin up to the trained length, in place of attention_factor (Phi-MoE)."
    )
    long_mscale: AttentionFactor | None = Field(
        None, description="Multiplies cos and sin past the trained length; given with short_mscale."
    )

    @model_validator(mode="after")
    def _both_mscales_or_none(self) -> Self:
        if (self.short_mscale is None) != (self.long_mscale is None):
            missing = "short_mscale" if self.short_mscale is None else "long_mscale"
            raise ValueError(f"{missing}: missing; short_mscale and long_mscale go together")
        if self.short_mscale is not None and self.attention_factor is not None:
            raise ValueError("attention_factor: short_mscale and long_mscale take its place; leave it out")
        return self

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        """Divisors that rise geometrically from 1."""
        pairs = max(1, geometry.rotary_dim // 2)
        rising = [float(times) ** (pair / max(1, pairs - 1)) for pair in range(pairs)]
        return {"factor": float(times), "short_factor": [1.0] * pairs, "long_factor": rising}

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        pairs = geometry.rotary_dim // 2
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != pairs:
                raise ValueError(f"{name}: this model has {pairs} rotary pairs, so the list needs {pairs} values")
        trained_length = self.trained_length(geometry)
        schedule = LongRopeSchedule(
            self.theta(geometry),
            self.short_factor,
            self.long_factor,
            trained_length,
            *self._factors_on_cos_and_sin(geometry, trained_length),
        )
        return Recipe(schedule)

    def _factors_on_cos_and_sin(self, geometry: RopeGeometry, trained_length: int) -> tuple[float, float]:
        """Up to the trained length and past it."""
        if self.short_mscale is not None and self.long_mscale is not None:
            return self.short_mscale, self.long_mscale
        factor, given = self.ratio(geometry), self.attention_factor
        if given is None:
            given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_length))
        return given, given

    def ratio(self, geometry: RopeGeometry) -> float:
        return self.factor or max(1.0, geometry.max_position_embeddings / self.trained_length(geometry))

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"factor": self.ratio(geometry)}
