"""NTK-by-parts and YaRN: interpolate slow pairs, keep fast pairs, blend in between.

YaRN, arXiv:2309.00071, sections 3.2 to 3.4. As in the released code, and unlike the paper's text,
YaRN's ramp is linear in the pair index; "yarn_paper" is the text. NTK-by-parts here is the first
published version, which blends plain, NTK-aware and interpolated frequencies with two ramps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.fields import Factor, Turns, YarnFactor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import TrainedLengthMethod
from patches.encoding.ramps import TurnRange, TurnRangeMethod, linear_ramp, mscale, turns_of
from patches.encoding.recipe import Recipe
from patches.encoding.rotary import base_inv_freq
from patches.encoding.schedule import Frequencies, RopeType
from patches.encoding.temperature import ConstantTemperature

if TYPE_CHECKING:
    import torch

Mscale = Annotated[float, Field(ge=0.0, le=100.0, strict=True)]


@dataclass(frozen=True)
class ByPartsSchedule:
    factor: float
    beta: TurnRange
    gamma: TurnRange
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        dim, theta = geometry.rotary_dim, self.beta.rope_theta
        plain = base_inv_freq(theta, dim, dtype)
        # Written as a base on purpose: one frequency has no NTK base, but then no ramp reaches it.
        ntk = base_inv_freq(theta * self.factor ** (dim / max(dim - 2, 1)), dim, dtype)
        beta, gamma = (linear_ramp(*turns.pairs(dim), dim // 2, dtype) for turns in (self.beta, self.gamma))
        scaled = ntk * (1 - beta) + plain / self.factor * beta
        return Frequencies(plain * (1 - gamma) + scaled * gamma, 1.0, theta)


@dataclass(frozen=True)
class YarnSchedule:
    range: TurnRange
    factor: float
    attention_factor: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        dim = geometry.rotary_dim
        plain = base_inv_freq(self.range.rope_theta, dim, dtype)
        kept = 1 - linear_ramp(*self.range.pairs(dim), dim // 2, dtype)
        inv_freq = plain / self.factor * (1 - kept) + plain * kept
        return Frequencies(inv_freq, self.attention_factor, self.range.rope_theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        turns = self.range
        return {
            "rope_type": RopeType.YARN,
            "rope_theta": turns.rope_theta,
            "factor": self.factor,
            "attention_factor": self.attention_factor,
            "beta_fast": turns.beta_fast,
            "beta_slow": turns.beta_slow,
            "truncate": turns.truncate,
            "original_max_position_embeddings": turns.trained_length,
        }


@dataclass(frozen=True)
class DynamicYarnSchedule:
    """YaRN, frequencies and factor on cos and sin, for n / L0 with n = max(reserved length, L0)."""

    range: TurnRange
    depends_on_length: bool = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        return self._at(length).frequencies(geometry, length, dtype)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        return self._at(length).rope_parameters(geometry, length)

    def _at(self, length: int) -> YarnSchedule:
        factor = max(1.0, length / self.range.trained_length)
        return YarnSchedule(self.range, factor, mscale(factor))


@dataclass(frozen=True)
class TurnRampSchedule:
    """YaRN, equations 17 to 20: the ramp is linear in turns, from ``alpha`` (divided) to ``beta`` (kept)."""

    rope_theta: float
    factor: float
    trained_length: int
    alpha: float
    beta: float
    attention_factor: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        plain = base_inv_freq(self.rope_theta, geometry.rotary_dim, dtype)
        kept = ((turns_of(plain, self.trained_length) - self.alpha) / (self.beta - self.alpha)).clamp(0, 1)
        inv_freq = (plain / self.factor * (1 - kept) + plain * kept).to(dtype)
        return Frequencies(inv_freq, self.attention_factor, self.rope_theta)


class NtkByParts(TrainedLengthMethod):
    summary: ClassVar[str] = "NTK-by-parts: plain, NTK-aware and interpolated frequencies, blended by turns."
    use: ClassVar[str] = "YaRN's frequencies without its temperature; its first released form."
    avoid: ClassVar[str] = "New work: yarn supersedes it."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = "Superseded by YaRN (arXiv:2309.00071, section 3.3)."
    formula: ClassVar[str] = "plain -> (ntk -> linear), blended twice by turns over L0"
    paper: ClassVar[str] = "bloc97 2023; YaRN arXiv:2309.00071 section 3.2 (first released version)"
    training_free: ClassVar[str] = "Usable without tuning; YaRN without its temperature."
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

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

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        theta, trained_length = self.theta(geometry), self.trained_length(geometry)
        beta = TurnRange(theta, trained_length, self.beta_0, self.beta_1)
        gamma = TurnRange(theta, trained_length, self.gamma_0, self.gamma_1, fields=("gamma_0", "gamma_1"))
        # Without a pair in the range of beta, slow pairs are NTK-aware: the factor has an effect.
        return Recipe(ByPartsSchedule(self.factor, beta, gamma.scaling(geometry.rotary_dim)))


class Yarn(TurnRangeMethod):
    summary: ClassVar[str] = "YaRN: frequencies by parts, and a constant temperature on the rotated part."
    use: ClassVar[str] = "The first choice among pure frequency schedules."
    avoid: ClassVar[str] = "Traffic that is mostly short: a static factor costs short inputs a little."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = (
        "Llama-2-7B tuned, s = 32: 2.37 at 128k on Proof-pile (arXiv:2309.00071, table 2); untuned 8.06 at "
        "8k, 11.7 at 32k with NTK base on PG19 (arXiv:2402.17463, table 1)."
    )
    formula: ClassVar[str] = (
        "theta_i' = theta_i (1 - g_i) + (theta_i / s) g_i; cos and sin x (0.1 ln s + 1). Over the pairs from beta_fast "
        "to beta_slow turns, g_i rises from 0 to 1."
    )
    paper: ClassVar[str] = "YaRN, arXiv:2309.00071"
    training_free: ClassVar[str] = "Best after 400 tuning steps; usable without at a small cost on short inputs."
    multiples: ClassVar[tuple[float, ...]] = (1.0, 2.0)

    method: Literal["yarn"] = "yarn"
    factor: Factor | None = Field(
        None, description="Target length divided by the trained length; the model's own ratio when it declares one."
    )
    attention_factor: YarnFactor = None
    mscale: Mscale | None = Field(
        None, description="With mscale_all_dim: attention_factor is the ratio of the two (DeepSeek)."
    )
    mscale_all_dim: Mscale | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim go together")
        return self

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        factor = self.ratio(geometry)
        schedule = YarnSchedule(self.turn_range(geometry), factor, self._factor_on_cos_and_sin(factor))
        if geometry.latent and self.mscale_all_dim:
            # Latent attention rotates a part of each head; DeepSeek puts this share of the temperature on all of it.
            return Recipe(schedule, attention_temperature=ConstantTemperature(mscale(factor, self.mscale_all_dim) ** 2))
        return Recipe(schedule)

    def ratio(self, geometry: RopeGeometry) -> float:
        """Raises:
        ValueError: without ``factor`` on a model that declares none, and no maximum beyond its trained length.
        """
        if self.factor is not None:
            return self.factor
        own: float = getattr(geometry.native, "factor", None) or 1.0
        declared = max(own, geometry.max_position_embeddings / self.trained_length(geometry))
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


class DynamicYarn(TurnRangeMethod):
    summary: ClassVar[str] = "YaRN by just as much as the request's own reserved length needs."
    use: ClassVar[str] = "Mixed traffic on a model that was not tuned: short requests are untouched."
    avoid: ClassVar[str] = "Models tuned to one factor: give them yarn with that factor."
    reach: ClassVar[str] = "that of yarn at the factor n/L0"
    evidence: ClassVar[str] = "None cited here: YaRN's paper plots it (appendix B), its tables are of fixed factors."
    formula: ClassVar[str] = "yarn with s = max(1, n/L0), n the reserved length"
    paper: ClassVar[str] = "YaRN, arXiv:2309.00071 section 3.3 (released: LlamaDynamicYaRNScaledRotaryEmbedding)"
    training_free: ClassVar[str] = "Leaves short requests untouched; made for models that were not tuned to YaRN."
    cost: ClassVar[str] = "none; perplexity curves take one pass per length"

    method: Literal["dynamic_yarn"] = "dynamic_yarn"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(DynamicYarnSchedule(self.turn_range(geometry)))


class YarnPaper(TrainedLengthMethod):
    summary: ClassVar[str] = "YaRN as its paper writes it: the ramp is linear in turns, not in the pair index."
    use: ClassVar[str] = "Finding out how much the choice of ramp matters."
    avoid: ClassVar[str] = "Checkpoints called YaRN: they were tuned with the released code's ramp, which is yarn."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = "None: the published numbers of YaRN are of the released code's ramp."
    formula: ClassVar[str] = (
        "theta_i' = g theta_i + (1 - g) theta_i / s, g = clip((r_i - alpha) / (beta - alpha), 0, 1). Pair i makes "
        "r_i = L0 theta_i / (2 pi) turns; cos and sin as in yarn."
    )
    paper: ClassVar[str] = "YaRN, arXiv:2309.00071 equations 17 to 22"
    training_free: ClassVar[str] = (
        "Usable without tuning, like yarn; more pairs are interpolated a good part of the way."
    )

    method: Literal["yarn_paper"] = "yarn_paper"
    factor: Factor = Field(description="Target length divided by the trained length.")
    attention_factor: YarnFactor = None
    alpha: Turns = Field(1.0, description="Turns below which a pair is fully interpolated.")
    beta: Turns = Field(32.0, description="Turns above which a pair is left alone.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.beta <= self.alpha:
            raise ValueError("beta must be above alpha")
        return self

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        factor = self.attention_factor or mscale(self.factor)
        schedule = TurnRampSchedule(
            self.theta(geometry), self.factor, self.trained_length(geometry), self.alpha, self.beta, factor
        )
        return Recipe(schedule)
