"""ALiBi: no rotation, a linear penalty on distance with one slope per head.

Press et al., arXiv:2108.12409. The bias is slope x -(distance) in float32. It equals the key-index form of some
releases, because softmax ignores a constant per query. In bfloat16 the two differ, so Falcon-RW's form is a separate
class. Smaller slopes for longer inputs: arXiv:2310.13017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.biases import LinearBias
from patches.encoding.fields import MOST_FACTOR, Factor, Length
from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method, trained_length_of
from patches.encoding.recipe import Recipe

if TYPE_CHECKING:
    import torch


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """2^(-bias_max k / n) for k = 1..n heads, if n is a power of two.

    Otherwise the slopes of the power below, then every second slope of the power above, as in the authors' code.
    """
    power = 1 << int(math.log2(num_heads))
    ladder = [2 ** (-bias_max * k / power) for k in range(1, power + 1)]
    finer = [2 ** (-bias_max * k / (2 * power)) for k in range(1, 2 * power + 1)]
    return tuple((ladder + finer[0::2])[:num_heads])


@dataclass(frozen=True)
class DynamicLinearBias:
    """``bias`` with its slopes divided by max(1, n / trained_length) for a reserved length of n tokens."""

    bias: LinearBias
    trained_length: int
    depends_on_length: bool = True

    def at(self, length: int) -> LinearBias:
        factor = max(1.0, length / self.trained_length)
        return replace(self.bias, slopes=tuple(slope / factor for slope in self.bias.slopes))

    @property
    def by_distance(self) -> bool:
        return self.bias.by_distance

    def of_heads(self, heads: slice) -> DynamicLinearBias:
        return replace(self, bias=self.bias.of_heads(heads))

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        raise TypeError("known only once a length is reserved")


class Alibi(Method):
    also: ClassVar[tuple[str, ...]] = ("attention_with_linear_biases",)
    summary: ClassVar[str] = "ALiBi: rotation off, a linear penalty on distance on."
    use: ClassVar[str] = "Models trained with it."
    avoid: ClassVar[str] = "Recall from far away: distant tokens fade by construction."
    reach: ClassVar[str] = "any length, with a soft horizon that slope_factor pushes out, zero-shot to about 2 x L0"
    evidence: ClassVar[str] = "WikiText-103, trained at 512: 19.73 at 512, 18.40 at 3072 (arXiv:2108.12409, table 5)."
    formula: ClassVar[str] = "score = q . k / sqrt(d_h) - m_h (p - j), m_h the slope"
    paper: ClassVar[str] = "ALiBi, arXiv:2108.12409; slope scaling arXiv:2310.13017"
    training_free: ClassVar[str] = (
        "Flat perplexity at any length on weights trained with it. On a RoPE checkpoint it removes the "
        "positions the weights rely on."
    )
    cost: ClassVar[str] = "an additive bias per score"
    variant: ClassVar[str | None] = "alibi"
    family: ClassVar[Family] = "bias"

    method: Literal["alibi"] = "alibi"
    alibi_bias_max: Annotated[float, Field(gt=0.0, le=64.0, strict=True)] = Field(
        8.0, description="Exponent of the smallest slope (MPT: alibi_bias_max)."
    )
    slope_factor: Factor | Literal["dynamic"] = Field(
        1.0, description="Divides the slopes; dynamic is max(1, reserved length / trained length)."
    )
    original_max_position_embeddings: Length | None = Field(
        None, description="Trained length in tokens, for a dynamic slope_factor; the model's own when absent."
    )
    bias_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16 rounds slopes and their products with key positions, as Falcon-RW does."
    )
    scaled: bool = Field(
        False, strict=True, description="Divide the bias by sqrt(head_dim), as the scores are (Falcon-RW)."
    )
    use_variant: bool = Field(
        True,
        strict=True,
        description="Answer with the ALiBi-trained variant that the model declares; false keeps its weights.",
    )

    @model_validator(mode="after")
    def _length_has_an_effect(self) -> Self:
        if self.original_max_position_embeddings is not None and self.slope_factor != "dynamic":
            raise ValueError("original_max_position_embeddings: has an effect with slope_factor dynamic only")
        return self

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        """The checkpoint's own slopes, divided by as much as ``length`` needs, and by the root of it."""
        needed = min(max(1.0, length / geometry.original_max_position_embeddings), MOST_FACTOR)
        own = geometry.native
        if not isinstance(own, cls):
            return []
        return [own.model_copy(update={"slope_factor": factor}) for factor in (needed, math.sqrt(needed))]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        slopes = alibi_slopes(geometry.num_attention_heads, self.alibi_bias_max)
        scale = geometry.head_dim**-0.5 if self.scaled else 1.0
        bias = LinearBias(slopes, scale, self.bias_dtype == "bfloat16")
        if self.slope_factor == "dynamic":
            return Recipe(None, score_bias=DynamicLinearBias(bias, self.trained_length(geometry)))
        divided = tuple(slope / self.slope_factor for slope in slopes)
        return Recipe(None, score_bias=replace(bias, slopes=divided))

    def trained_length(self, geometry: RopeGeometry) -> int:
        return trained_length_of(self.original_max_position_embeddings, geometry)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        length = self.trained_length(geometry) if self.slope_factor == "dynamic" else None
        return super().parameters(geometry) | {"original_max_position_embeddings": length}
