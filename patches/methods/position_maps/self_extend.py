"""Self-Extend: exact positions for neighbours, grouped positions for everything further away.

Jin et al., arXiv:2401.01325, section 3.2. The shift of the grouped queries uses whole division in both terms. So does
the authors' corrected code (datamllab/LongLM, Llama_4_40.py). Their other files use w / G. With it, every far key has a
fractional position when G does not divide w.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from patches.encoding.bands import Band
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import DistanceRange
from patches.encoding.method import BasedMethod
from patches.encoding.positions import Grouped, grouped_reach
from patches.encoding.recipe import Recipe

LARGEST_GROUP = 4096


class SelfExtend(BasedMethod):
    summary: ClassVar[str] = "Self-Extend: neighbours keep exact positions, distant tokens share grouped ones."
    use: ClassVar[str] = "Untuned extension that keeps both perplexity and retrieval."
    avoid: ClassVar[str] = "Latency-bound decoding with a large window: its keys are rotated at every step."
    reach: ClassVar[str] = (
        "(L0 - w) x G + w for a window w of whole groups (less w mod G otherwise). The authors advise half to two "
        "thirds of it"
    )
    evidence: ClassVar[str] = (
        "Llama-2-7B untuned, PG19: 7.87 / 7.67 / 7.58 / 7.71 at 4k / 8k / 16k / 32k (AdaGroPE, table 2)."
    )
    formula: ClassVar[str] = "distance below w as it is; beyond: p // G - j // G + w - w // G"
    paper: ClassVar[str] = "Self-Extend, arXiv:2401.01325"
    training_free: ClassVar[str] = "Works without tuning up to (trained length - window) x group + window."
    cost: ClassVar[str] = "keys in the window are rotated when read; two attentions over disjoint pairs"
    rotates_at: ClassVar[str] = "cache_read"

    method: Literal["self_extend"] = "self_extend"
    group_size: Annotated[int, Field(ge=1, le=LARGEST_GROUP, strict=True)] = Field(
        8, description="Number of positions that share one."
    )
    neighbor_window: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] | None = Field(
        None, description="Distance below which positions stay exact; a quarter of the trained length when absent."
    )

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        """The smallest groups that put ``length`` tokens into all of the trained distances, and into two thirds."""
        trained, window = geometry.original_max_position_embeddings, cls().window(geometry)
        return [cls(group_size=_smallest(distances, window, length)) for distances in (trained, trained * 2 // 3)]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        window, group = self.window(geometry), self.group_size
        near = Band(predicate=DistanceRange(0, window))
        far = Band(Grouped(group, window - window // group), Grouped(group), DistanceRange(window))
        return self.on_base(geometry, near, far)

    def stretched(self, trained: int, geometry: RopeGeometry) -> int | None:
        return grouped_reach(trained, self.window(geometry), self.group_size)

    def window(self, geometry: RopeGeometry) -> int:
        return self.neighbor_window or max(1, self.attended(geometry) // 4)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"neighbor_window": self.window(geometry)}


def _smallest(trained: int, window: int, length: int) -> int:
    """The smallest group that reaches ``length`` within ``trained`` distances, or else the largest one."""
    groups = range(1, LARGEST_GROUP)
    return next((group for group in groups if grouped_reach(trained, window, group) >= length), LARGEST_GROUP)
