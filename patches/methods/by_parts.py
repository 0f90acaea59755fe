"""NTK-by-parts and YaRN: interpolate slow pairs, keep fast pairs, blend in between.

YaRN, arXiv:2309.00071, sections 3.2 to 3.4. As in the released code, and unlike the paper's text,
YaRN's ramp is linear in the pair index. NTK-by-parts here is the first published version, which
blends plain, NTK-aware and interpolated frequencies with two ramps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from patches.method import AttentionFactor, Factor, TrainedLengthMethod, Turns
from patches.ramps import linear_ramp, pair_range
from patches.recipe import Frequencies, Recipe, RopeGeometry
from patches.rotary import base_inv_freq

Mscale = Annotated[float, Field(ge=0.0, le=100.0, strict=True)]


@dataclass(frozen=True)
class ByPartsSchedule:
    rope_theta: float
    factor: float
    trained_length: int
    beta: tuple[float, float]
    gamma: tuple[float, float]
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int) -> Frequencies:
        dim, theta = geometry.rotary_dim, self.rope_theta
        plain = base_inv_freq(theta, dim)
        # Written as a base on purpose: one frequency has no NTK base, but then no ramp reaches it.
        ntk = base_inv_freq(theta * self.factor ** (dim / max(dim - 2, 1)), dim)

        def ramp(turns: tuple[float, float]) -> torch.Tensor:
            low, high = pair_range(*turns, rotary_dim=dim, rope_theta=theta, trained_length=self.trained_length)
            return linear_ramp(low, high, dim // 2)

        beta, gamma = ramp(self.beta), ramp(self.gamma)
        scaled = ntk * (1 - beta) + plain / self.factor * beta
        return Frequencies(plain * (1 - gamma) + scaled * gamma, 1.0, theta)


@dataclass(frozen=True)
class YarnSchedule:
    rope_theta: float
    factor: float
    trained_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int) -> Frequencies:
        dim = geometry.rotary_dim
        low, high = pair_range(
            self.beta_fast,
            self.beta_slow,
            rotary_dim=dim,
            rope_theta=self.rope_theta,
            trained_length=self.trained_length,
            truncate=self.truncate,
        )
        plain = base_inv_freq(self.rope_theta, dim)
        kept = 1 - linear_ramp(low, high, dim // 2)
        inv_freq = plain / self.factor * (1 - kept) + plain * kept
        return Frequencies(inv_freq, self.attention_factor, self.rope_theta)


class NtkByParts(TrainedLengthMethod):
    summary: ClassVar[str] = "NTK-by-parts: plain, NTK-aware and interpolated frequencies, blended by turns."
    paper: ClassVar[str] = "bloc97 2023; YaRN arXiv:2309.00071 section 3.2 (first released version)"
    training_free: ClassVar[str] = "Usable without tuning; YaRN without its temperature."
    cost: ClassVar[str] = "none"

    method: Literal["ntk_by_parts"] = "ntk_by_parts"
    factor: Factor = Field(description="Target length divided by the trained length.")
    beta_0: Turns = Field(1.25, description="Turns above which the slow part is NTK-aware.")
    beta_1: Turns = Field(0.75, description="Turns below which the slow part is interpolated.")
    gamma_0: Turns = Field(16.0, description="Turns above which a pair is left alone.")
    gamma_1: Turns = Field(2.0, description="Turns below which a pair is fully scaled.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.beta_0 <= self.beta_1 or self.gamma_0 <= self.gamma_1:
            raise ValueError("beta_0 must be above beta_1 and gamma_0 above gamma_1")
        return self

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        turns = ((self.beta_0, self.beta_1), (self.gamma_0, self.gamma_1))
        return Recipe(ByPartsSchedule(self.theta(geometry), self.factor, self.trained_length(geometry), *turns))


def mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 x weight x ln(factor) + 1, or 1 up to factor 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Yarn(TrainedLengthMethod):
    summary: ClassVar[str] = "YaRN: frequencies by parts, and a constant temperature on the rotated part."
    paper: ClassVar[str] = "YaRN, arXiv:2309.00071"
    training_free: ClassVar[str] = "Best after 400 tuning steps; usable without at a small cost on short inputs."
    cost: ClassVar[str] = "none"

    method: Literal["yarn"] = "yarn"
    factor: Factor | None = Field(
        None, description="Target length divided by the trained length; the model's own ratio when it declares one."
    )
    attention_factor: AttentionFactor | None = Field(
        None, description="Multiplies cos and sin; 0.1 ln(factor) + 1 when absent."
    )
    beta_fast: Turns = Field(32.0, description="Turns above which a pair is left alone.")
    beta_slow: Turns = Field(1.0, description="Turns below which a pair is fully interpolated.")
    mscale: Mscale | None = Field(
        None, description="With mscale_all_dim: attention_factor is the ratio of the two (DeepSeek)."
    )
    mscale_all_dim: Mscale | None = None
    truncate: bool = Field(True, strict=True, description="Round the range of blended pairs outwards (gpt-oss: false).")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError("beta_fast must be above beta_slow")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim go together")
        return self

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        factor = self.ratio(geometry)
        schedule = YarnSchedule(
            rope_theta=self.theta(geometry),
            factor=factor,
            trained_length=self.trained_length(geometry),
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            attention_factor=self._factor_on_cos_and_sin(factor),
        )
        return Recipe(schedule)

    def ratio(self, geometry: RopeGeometry) -> float:
        """Raises:
        ValueError: without ``factor`` on a model whose maximum is its trained length.
        """
        if self.factor is not None:
            return self.factor
        declared = geometry.max_position_embeddings / self.trained_length(geometry)
        if declared <= 1:
            raise ValueError("factor: required, this model declares no length beyond its trained one")
        return declared

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"factor": self.ratio(geometry)}

    def _factor_on_cos_and_sin(self, factor: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(factor, self.mscale) / mscale(factor, self.mscale_all_dim)
        return mscale(factor)
