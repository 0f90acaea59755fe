"""KERPLE: a kernel of the distance as a bias, with two learned parameters per head.

Chi et al., arXiv:2205.09921, section 4: -r1 ln(1 + r2 distance), or -r1 distance^r2 with r2 <= 2. The learned
values belong to a model. The defaults are the means of what the released code starts training from.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from patches.encoding.biases import LogBias, PowerBias
from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe

Weight = Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]
Exponent = Annotated[float, Field(ge=1e-6, le=2.0, strict=True)]
Weights: TypeAlias = Weight | Annotated[tuple[Weight, ...], Field(min_length=1, max_length=1024)]
Exponents: TypeAlias = Exponent | Annotated[tuple[Exponent, ...], Field(min_length=1, max_length=1024)]


class KerpleLog(Method):
    summary: ClassVar[str] = "KERPLE, logarithmic kernel: rotation off, a penalty on the logarithm of the distance on."
    use: ClassVar[str] = "Models trained with it, with the r1 and r2 that they learned."
    avoid: ClassVar[str] = "Weights trained with anything else, where it is a negative control."
    reach: ClassVar[str] = "any length: the penalty grows with the logarithm of the distance"
    evidence: ClassVar[str] = (
        "OpenWebText2, GitHub, ArXiv, trained at 512: the best extrapolating kernel of the paper (arXiv:2205.09921)."
    )
    formula: ClassVar[str] = "score = q . k / sqrt(d_h) - r1_h ln(1 + r2_h (p - j)), r1_h and r2_h are learned"
    paper: ClassVar[str] = "KERPLE, arXiv:2205.09921"
    training_free: ClassVar[str] = "For models trained with it; on a RoPE checkpoint it removes the positions."
    cost: ClassVar[str] = "an additive bias per score"
    family: ClassVar[Family] = "bias"

    method: Literal["kerple_log"] = "kerple_log"
    r1: Weights = Field(1.0, description="Weight of the logarithm: one number, or one per head.")
    r2: Weights = Field(0.5, description="Weight of the distance: one number, or one per head.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None, score_bias=LogBias(*_per_head(self.r1, self.r2, geometry)))


class KerplePower(Method):
    summary: ClassVar[str] = "KERPLE, power kernel: rotation off, a penalty on a power of the distance on."
    use: ClassVar[str] = "Models trained with it, with the r1 and r2 that they learned."
    avoid: ClassVar[str] = "Recall from far away; weights trained with anything else."
    reach: ClassVar[str] = "any length, with a soft horizon as in ALiBi, which is r2 = 1"
    evidence: ClassVar[str] = (
        "OpenWebText2, GitHub, ArXiv, trained at 512: extrapolates, less well than the logarithmic kernel "
        "(arXiv:2205.09921)."
    )
    formula: ClassVar[str] = "score = q . k / sqrt(d_h) - r1_h (p - j)^(r2_h), r1_h and r2_h are learned"
    paper: ClassVar[str] = "KERPLE, arXiv:2205.09921"
    training_free: ClassVar[str] = "For models trained with it; on a RoPE checkpoint it removes the positions."
    cost: ClassVar[str] = "an additive bias per score"
    family: ClassVar[Family] = "bias"

    method: Literal["kerple_power"] = "kerple_power"
    r1: Weights = Field(0.5, description="Weight of the power: one number, or one per head.")
    r2: Exponents = Field(1.0, description="Exponent of the distance, at most 2: one number, or one per head.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None, score_bias=PowerBias(*_per_head(self.r1, self.r2, geometry)))


def _per_head(r1: Weights, r2: Weights, geometry: RopeGeometry) -> tuple[tuple[float, ...], tuple[float, ...]]:
    heads = geometry.num_attention_heads
    for name, value in (("r1", r1), ("r2", r2)):
        if isinstance(value, tuple) and len(value) != heads:
            raise ValueError(f"{name}: this model has {heads} attention heads, so a list needs {heads} values")
    first, second = (value if isinstance(value, tuple) else (value,) * heads for value in (r1, r2))
    return first, second
