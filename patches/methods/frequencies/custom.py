"""A frequency per rotary pair, given as a list: for searched, trained or hand-made schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from patches.encoding.fields import AttentionFactor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import FrequencyMethod
from patches.encoding.recipe import Recipe
from patches.encoding.schedule import Frequencies

if TYPE_CHECKING:
    import torch

InverseFrequencies = Annotated[
    tuple[Annotated[float, Field(ge=0.0, le=6.284, strict=True)], ...], Field(min_length=1, max_length=1024)
]
"""Radians per token. Past one turn per token (2 pi) a frequency looks like a smaller one."""


@dataclass(frozen=True)
class ListedSchedule:
    """The list itself. No base describes it, hence 0."""

    inv_freq: tuple[float, ...]
    attention_factor: float
    depends_on_length: bool = False
    decides_on_pairs: ClassVar[bool] = True
    is_final: ClassVar[bool] = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        return Frequencies(torch.tensor(self.inv_freq, dtype=dtype), self.attention_factor, 0.0)


class Custom(FrequencyMethod):
    summary: ClassVar[str] = "Any frequencies: one number per rotary pair, in radians per token."
    use: ClassVar[str] = "Searched, fitted or hand-made schedules, and taking single pairs out."
    avoid: ClassVar[str] = "Anything a named method does: its name and parameters say more than a list."
    reach: ClassVar[str] = "that of the list"
    evidence: ClassVar[str] = "None; longrope has results of searched schedules."
    formula: ClassVar[str] = "theta_i' = inv_freq[i]"
    paper: ClassVar[str] = "RoFormer, arXiv:2104.09864, section 3.2.2, with the frequencies left open"
    training_free: ClassVar[str] = "As good as the list."

    method: Literal["custom"] = "custom"
    inv_freq: InverseFrequencies = Field(
        description="Radians per token, pair by pair; 0 keeps a pair from rotating. As many as the model has pairs."
    )
    attention_factor: AttentionFactor = Field(1.0, description="Multiplies cos and sin.")
    rope_theta: None = Field(None, description="Not taken: the list leaves nothing to a base.")

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        """The model's own frequencies; those that make no whole turn within the trained length divided."""
        pairs = max(1, geometry.rotary_dim // 2)
        own = [(geometry.rope_theta or 1e4) ** (-pair / pairs) for pair in range(pairs)]
        slow = 2 * math.pi / geometry.original_max_position_embeddings
        return {"inv_freq": [frequency / times if frequency < slow else frequency for frequency in own]}

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        pairs = geometry.rotary_dim // 2
        if len(self.inv_freq) != pairs:
            raise ValueError(
                f"inv_freq: this model has {pairs} rotary pairs, so the list needs {pairs} values; "
                f"it has {len(self.inv_freq)}"
            )
        self.theta(geometry)  # checks the model's rotated share; the base has no part in this
        return Recipe(ListedSchedule(self.inv_freq, self.attention_factor))

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"rope_theta": None}
