"""ALiBi: no rotation, a linear penalty on distance with one slope per head.

Press et al., arXiv:2108.12409. The bias is slope x -(distance) in float32, which equals the
key-index form of some releases because softmax ignores a constant per query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from patches.method import Method
from patches.recipe import Recipe, RopeGeometry


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """2^(-bias_max k / n) for k = 1..n heads; for n no power of two, the ladder of the power below
    followed by every second rung of the next ladder, as in the authors' code."""
    power = 1 << int(math.log2(num_heads))
    ladder = [2 ** (-bias_max * k / power) for k in range(1, power + 1)]
    finer = [2 ** (-bias_max * k / (2 * power)) for k in range(1, 2 * power + 1)]
    return tuple((ladder + finer[0::2])[:num_heads])


@dataclass(frozen=True)
class LinearBias:
    """-slope x distance per head."""

    slopes: tuple[float, ...]

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=q_idx.device)
        return slopes[:, None, None] * (kv_idx - q_idx).float()


class Alibi(Method):
    summary: ClassVar[str] = "ALiBi: rotation off, a linear penalty on distance on."
    paper: ClassVar[str] = "ALiBi, arXiv:2108.12409"
    training_free: ClassVar[str] = (
        "Flat perplexity at any length on weights trained with it; on a RoPE checkpoint it removes the "
        "positions the weights rely on."
    )
    cost: ClassVar[str] = "an additive bias per score"
    variant: ClassVar[str | None] = "alibi"
    rotates_at: ClassVar[str] = "never"

    method: Literal["alibi"] = "alibi"
    alibi_bias_max: Annotated[float, Field(gt=0.0, le=64.0, strict=True)] = Field(
        8.0, description="Exponent of the steepest ladder (MPT: alibi_bias_max)."
    )
    use_variant: bool = Field(
        True,
        strict=True,
        description="Answer with the ALiBi-trained variant that the model declares; false keeps its weights.",
    )

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        slopes = alibi_slopes(geometry.num_attention_heads, self.alibi_bias_max)
        return Recipe(schedule=None, score_bias=LinearBias(slopes))
