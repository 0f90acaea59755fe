"""Sandwich: of sinusoidal position embeddings only the inner product, as a bias on distance.

Chi et al., arXiv:2212.10356, section 5: p_m . p_n = sum over i of cos((m - n) / 10000^(2i / d)), divided by a
compression ratio per head, 8k / n for head k = 1..n. The value at distance 0, d / 2, is taken off so that
no score rises; softmax does not see the difference. Pairs count from 0, as in the paper's listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from patches.encoding.method import Method
from patches.encoding.recipe import Family, Recipe, RopeGeometry

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=8)
def _products(dim: int, length: int, device: torch.device) -> torch.Tensor:
    """p_m . p_n - dim / 2 for every distance below ``length``, float32; summed in float64, for angles are large."""
    import torch

    distance = torch.arange(length, dtype=torch.float64, device=device)
    product = torch.full_like(distance, -dim / 2)
    for i in range(dim // 2):
        product += torch.cos(distance / 10_000.0 ** (2 * i / dim))
    return product.float()


@dataclass(frozen=True)
class SandwichBias:
    """(sum over i < dim / 2 of cos(distance / 10000^(2i / dim)) - dim / 2) x heads / 8k for head k."""

    dim: int
    heads: int

    def __call__(self, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        import torch

        distance = (q_idx - kv_idx).clamp_min(0)
        length = 1 << int(distance.max()).bit_length()  # few lengths, so that a table serves many steps
        ratio = torch.arange(1, self.heads + 1, device=q_idx.device) * 8 / self.heads
        return _products(self.dim, length, q_idx.device)[distance] / ratio[:, None, None]


class Sandwich(Method):
    summary: ClassVar[str] = "Sandwich: rotation off, the inner product of sinusoidal embeddings as a bias on."
    use: ClassVar[str] = "Models trained with it."
    avoid: ClassVar[str] = "Weights trained with anything else, where it is a negative control."
    reach: ClassVar[str] = "any length: the bias falls with the logarithm of the distance"
    evidence: ClassVar[str] = (
        "OpenWebText2, ArXiv, GitHub, trained at 512: falls like KERPLE and T5 bias, without a learned parameter "
        "(arXiv:2212.10356)."
    )
    formula: ClassVar[str] = "score = q . k / sqrt(d_h) + (sum_i cos((p - j) / 10000^(2i/d)) - d/2) n / (8k)"
    paper: ClassVar[str] = "Sandwich, arXiv:2212.10356"
    training_free: ClassVar[str] = "For models trained with it; on a RoPE checkpoint it removes the positions."
    cost: ClassVar[str] = "an additive bias per score"
    rotates_at: ClassVar[str] = "never"
    family: ClassVar[Family] = "bias"

    method: Literal["sandwich"] = "sandwich"
    dim: Annotated[int, Field(ge=2, le=4096, multiple_of=2, strict=True)] = Field(
        128, description="Width d of the sinusoidal embeddings, even; the paper has 128 for every model."
    )

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(None, score_bias=SandwichBias(self.dim, geometry.num_attention_heads))
