"""DPE: Self-Extend with a separate group size for every group of frequencies.

Lu et al., arXiv:2504.18857; code LuLuLuyi/DPE. Whole division throughout, as the authors decode. Their prefill divides
w by the factor without rounding, which is equal when the factor divides w. All rotary pairs take part: the authors'
option to treat only some dimensions of each head is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from patches.encoding.bands import Band
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import DistanceRange
from patches.encoding.method import BasedMethod
from patches.encoding.positions import GroupedPairs, grouped_reach
from patches.encoding.recipe import Recipe


class Dpe(BasedMethod):
    summary: ClassVar[str] = "DPE: as Self-Extend, with a group size for every group of frequencies."
    use: ClassVar[str] = "Untuned extension of a model whose factors were measured by retrieval."
    avoid: ClassVar[str] = "Models without measured factors: self_extend needs none."
    reach: ClassVar[str] = "the smallest over the factors s of (L0 - w) x s + w (less w mod s)"
    evidence: ClassVar[str] = (
        "Factors published for Llama-3-8B-Instruct: 2,8,2,8,32,32,32,4; Llama-3.1: 2,32,32,2,2,2,2,1; "
        "Qwen2.5: 2,16,8,8,32,8,2,4 (released configurations)."
    )
    formula: ClassVar[str] = "per pair with factor s: p - j below w; beyond: p // s - j // s + w - w // s"
    paper: ClassVar[str] = "DPE, arXiv:2504.18857"
    training_free: ClassVar[str] = "Works without tuning once the factors of a model are measured."
    cost: ClassVar[str] = "keys in the window are rotated when read; two attentions over disjoint pairs"
    rotates_at: ClassVar[str] = "cache_read"

    method: Literal["dpe"] = "dpe"
    group_factors: tuple[Annotated[int, Field(ge=1, le=4096, strict=True)], ...] = Field(
        description="Group size of each group of rotary pairs, from the highest frequencies to the lowest. The number "
        "of groups must divide the number of rotary pairs (published: one for 8 pairs).",
        min_length=1,
        max_length=4096,
    )
    neighbor_window: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] | None = Field(
        None,
        description="Distance below which positions stay exact; when absent 1024, or a quarter of the trained "
        "length where that is less.",
    )

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        """Group sizes of twice the extension, and four times for the slow half of the pairs."""
        return {"group_factors": [2 * round(times), 4 * round(times)]}

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        window, factors = self.window(geometry), self.per_pair(geometry)
        near = Band(predicate=DistanceRange(0, window))
        query = GroupedPairs(factors, tuple(window - window // factor for factor in factors))
        far = Band(query, GroupedPairs(factors, (0,) * len(factors)), DistanceRange(window))
        return self.on_base(geometry, near, far)

    def stretched(self, trained: int, geometry: RopeGeometry) -> int | None:
        return min(grouped_reach(trained, self.window(geometry), factor) for factor in self.group_factors)

    def window(self, geometry: RopeGeometry) -> int:
        return self.neighbor_window or max(1, min(1024, self.attended(geometry) // 4))

    def per_pair(self, geometry: RopeGeometry) -> tuple[int, ...]:
        """Group size of every rotary pair.

        Raises:
            ValueError: when the pairs do not divide into that many groups.
        """
        pairs, groups = geometry.rotary_dim // 2, len(self.group_factors)
        if pairs % groups:
            raise ValueError(f"group_factors: this model has {pairs} rotary pairs, which {groups} groups do not divide")
        return tuple(factor for factor in self.group_factors for _ in range(pairs // groups))

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"neighbor_window": self.window(geometry)}
