"""Positions that a model adds to its tokens: a learned table, or sinusoids, and their extensions.

Learned table: Gehring et al., arXiv:1705.03122. Sinusoid: Vaswani et al., arXiv:1706.03762, section 3.5. Interpolation
after Chen et al., arXiv:2306.15595, or end to end as image models resize theirs (arXiv:2010.11929, section 3.2). Split
by hierarchy: Su, kexue.fm 7947.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.bands import PositionMap
from patches.encoding.fields import Factor
from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.positions import Stretched
from patches.encoding.recipe import AbsoluteMap, Recipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class At:
    """The embedding at the one position that ``position_map`` gives."""

    position_map: PositionMap

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.position_map(position).double()[:, None]
        return at.new_ones(at.shape).float(), at


@dataclass(frozen=True)
class EndAligned:
    """The first reserved position in the first row, the last in the last row, if the table is too short."""

    rows: int
    depends_on_length: bool = True

    def at(self, length: int) -> At | None:
        return At(Stretched((length - 1) / (self.rows - 1))) if length > self.rows else None

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("known only once a length is reserved")


@dataclass(frozen=True)
class Hierarchical:
    """alpha u_i + (1 - alpha) u_j at position i x rows + j, where u = (T - alpha T_0) / (1 - alpha).

    This equals T_j + alpha / (1 - alpha) (T_i - T_0): the table itself below ``rows``.
    """

    alpha: float
    rows: int

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        i, j = position // self.rows, position % self.rows
        weight = torch.where(i > 0, self.alpha / (1.0 - self.alpha), 0.0).float()
        return torch.stack((torch.ones_like(weight), weight, -weight), 1), torch.stack((j, i, i * 0), 1).double()


class Learned(Method):
    summary: ClassVar[str] = "Learned absolute positions: one trained vector per position, added to the token."
    use: ClassVar[str] = "Models trained with it (GPT-2, OPT), up to the end of their table."
    avoid: ClassVar[str] = "Anything past the table: there is no vector, so it is refused."
    reach: ClassVar[str] = "L0, the rows of the table"
    evidence: ClassVar[str] = (
        "English to German, learned in place of sinusoidal positions: 25.7 BLEU against 25.8 (arXiv:1706.03762, "
        "table 3, row E)."
    )
    formula: ClassVar[str] = "x_p = token_p + T[p]"
    paper: ClassVar[str] = "arXiv:1705.03122"
    training_free: ClassVar[str] = "Exact up to the last row of the table, and refused after it."
    family: ClassVar[Family] = "learned"

    method: Literal["learned"] = "learned"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None)


class LearnedInterpolation(Method):
    summary: ClassVar[str] = "A learned table read between its rows, so that more positions fit into it."
    use: ClassVar[str] = "Learned absolute positions past the end of their table."
    avoid: ClassVar[str] = "Weights not tuned for it, where quality matters: no fractional step was ever trained."
    reach: ClassVar[str] = "factor x L0; any length with align ends"
    evidence: ClassVar[str] = (
        "No published numbers for language models; image models resize theirs, and are then tuned."
    )
    formula: ClassVar[str] = "x_p = token_p + T[p / s], or T[p (L0 - 1) / (n - 1)] with align ends"
    paper: ClassVar[str] = "Position interpolation, arXiv:2306.15595, applied to a table"
    training_free: ClassVar[str] = "Runs past the table; quality falls far on weights not tuned for it."
    cost: ClassVar[str] = "two rows read per token"
    family: ClassVar[Family] = "learned"
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["learned_interpolation"] = "learned_interpolation"
    align: Literal["scale", "ends"] = Field(
        "scale",
        description="`scale` divides positions by factor. `ends` puts the last reserved token (prompt and new) on the "
        "last row, and is the table itself when they fit.",
    )
    factor: Factor | None = Field(None, description="Divisor of positions, with align scale.")

    @model_validator(mode="after")
    def _factor_belongs_to_scale(self) -> Self:
        if (self.factor is None) == (self.align == "scale"):
            raise ValueError("factor: needed with align scale, without effect with align ends")
        return self

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        absolute: AbsoluteMap = EndAligned(table_rows(geometry))
        if self.factor is not None:
            absolute = At(Stretched(self.factor))
        return Recipe(None, absolute=absolute)


class LearnedHierarchical(Method):
    summary: ClassVar[str] = "A learned table split in two: each position is a pair of rows, so L0 rows make L0 x L0."
    use: ClassVar[str] = "Learned absolute positions far past the end of their table; tuned weights."
    avoid: ClassVar[str] = "Weights not tuned for it: past the table no sum of two rows was ever trained."
    reach: ClassVar[str] = "L0 x L0; the table itself up to L0"
    evidence: ClassVar[str] = "Proposed for BERT, to be tuned; no published numbers for causal language models."
    formula: ClassVar[str] = (
        "x_p = token_p + a u_x + (1 - a) u_y at p = x L0 + y, u = (T - a T[0]) / (1 - a), a = alpha"
    )
    paper: ClassVar[str] = "Su, kexue.fm 7947"
    training_free: ClassVar[str] = "Exact up to L0; past it a start for tuning."
    cost: ClassVar[str] = "three rows read per token"
    family: ClassVar[Family] = "learned"

    method: Literal["learned_hierarchical"] = "learned_hierarchical"
    alpha: Annotated[float, Field(ge=0.01, le=0.99, strict=True)] = Field(
        0.4, description="Weight of the coarse half; 0.5 would make i, j and j, i the same."
    )

    @model_validator(mode="after")
    def _halves_differ(self) -> Self:
        if self.alpha == 0.5:
            raise ValueError("alpha: 0.5 gives positions i L0 + j and j L0 + i the same vector")
        return self

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        return [cls()]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None, absolute=Hierarchical(self.alpha, table_rows(geometry)))


class Sinusoidal(Method):
    summary: ClassVar[str] = "Sinusoidal absolute positions: sines and cosines of the position, added to the token."
    use: ClassVar[str] = "Models trained with it (XGLM)."
    avoid: ClassVar[str] = "Reading past the trained length: the formula continues, the training does not."
    reach: ClassVar[str] = "L0; a few tokens more at most"
    evidence: ClassVar[str] = (
        "WikiText-103, trained at 512: perplexity falls for 20 tokens more and rises from 50 on (arXiv:2108.12409, "
        "section 2.2)."
    )
    formula: ClassVar[str] = "x_p = token_p + (sin(p f_i), cos(p f_i)), f_i = 10000^(-2i/d)"
    paper: ClassVar[str] = "arXiv:1706.03762"
    training_free: ClassVar[str] = "Exact up to the trained length; degrades soon after."
    family: ClassVar[Family] = "sinusoidal"

    method: Literal["sinusoidal"] = "sinusoidal"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None)


class SinusoidalInterpolation(Method):
    summary: ClassVar[str] = "Sinusoidal positions divided by one factor."
    use: ClassVar[str] = "Sinusoidal models past their trained length."
    avoid: ClassVar[str] = "Weights not tuned for it, where quality matters: neighbours come closer than trained."
    reach: ClassVar[str] = "factor x L0"
    evidence: ClassVar[str] = "No published numbers for sinusoids; for rotary models see linear."
    formula: ClassVar[str] = "x_p = token_p + (sin(p f_i / s), cos(p f_i / s)), f_i = 10000^(-2i/d)"
    paper: ClassVar[str] = "Position interpolation, arXiv:2306.15595, applied to sinusoids"
    training_free: ClassVar[str] = "Runs past the trained length; loses some quality on weights not tuned for it."
    family: ClassVar[Family] = "sinusoidal"
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["sinusoidal_interpolation"] = "sinusoidal_interpolation"
    factor: Factor = Field(description="Divisor of positions.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None, absolute=At(Stretched(self.factor)))


def table_rows(geometry: RopeGeometry) -> int:
    """Number of positions in the model's table.

    Raises:
        ValueError: when the model has no table.
    """
    if geometry.table_rows is None:
        raise ValueError("method: this model's geometry names no table of learned positions (table_rows)")
    return geometry.table_rows
