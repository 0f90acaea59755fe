"""p-RoPE: the fastest share of the pairs rotates, the slow rest carries no position.

Barbero et al., arXiv:2410.06205, section 6; transformers' ``proportional`` (Gemma 4). The exponent counts
in head_dim, unlike partial rotary embeddings, whose exponent counts in rotated dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
class ProportionalSchedule:
    rope_theta: float
    factor: float
    rotating_pairs: int
    depends_on_length: bool = False
    decides_on_pairs: ClassVar[bool] = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        inv_freq = base_inv_freq(self.rope_theta, geometry.head_dim, dtype) / self.factor
        rotates = torch.arange(len(inv_freq)) < self.rotating_pairs
        return Frequencies(inv_freq * rotates, 1.0, self.rope_theta)


class Proportional(FrequencyMethod):
    summary: ClassVar[str] = "p-RoPE: only the fastest share of the pairs rotates; the slow ones know no position."
    use: ClassVar[str] = "Models trained with it (Gemma 4); elsewhere finding out what the slow pairs do."
    avoid: ClassVar[str] = "Extending models that were trained with all pairs."
    reach: ClassVar[str] = "what the model was trained for; L0 elsewhere"
    evidence: ClassVar[str] = (
        "Gemma 2B trained from scratch: lower perplexity with three quarters of the pairs than with all "
        "(arXiv:2410.06205, section 6)."
    )
    formula: ClassVar[str] = "theta_i' = b^(-2i/d_h) / s for i < f d_h/2, else 0; f = partial_rotary_factor"
    paper: ClassVar[str] = "p-RoPE, arXiv:2410.06205"
    training_free: ClassVar[str] = "On a model trained with plain RoPE a diagnostic of what its slow pairs do."

    method: Literal["proportional"] = "proportional"
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = Field(
        None, description="Share of the pairs that rotate, the fastest first; that of the model, or all, when absent."
    )
    factor: Factor = Field(1.0, description="Division of the frequencies that stay.")

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        """Three quarters of the pairs, as the paper has it."""
        return {"partial_rotary_factor": 0.75}

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        theta, pairs = self.theta(geometry), geometry.head_dim // 2
        rotating = self.rotating_pairs(geometry)
        if rotating == 0:
            raise ValueError(
                f"partial_rotary_factor: must be at least 1/{pairs} for one of this model's pairs to rotate"
            )
        return Recipe(ProportionalSchedule(theta, self.factor, rotating))

    def rotating_pairs(self, geometry: RopeGeometry) -> int:
        """Pairs that rotate, the fastest first."""
        return int(self._share(geometry) * geometry.head_dim // 2)

    def _share(self, geometry: RopeGeometry) -> float:
        native = geometry.native.partial_rotary_factor if isinstance(geometry.native, Proportional) else None
        return self.partial_rotary_factor or native or 1.0

    def theta(self, geometry: RopeGeometry) -> float:
        """The base in effect. ``partial_rotary_factor`` says nothing about the model's width here.

        Raises:
            ValueError: on a model that rotates a part of each head, whose table is too narrow for this.
        """
        if geometry.rotary_dim != geometry.head_dim:
            raise ValueError(
                f"method: proportional needs a rotary table as wide as the head, and this model rotates "
                f"{geometry.rotary_dim} of {geometry.head_dim} dimensions"
            )
        return self.rope_theta or geometry.rope_theta

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"partial_rotary_factor": self._share(geometry)}
