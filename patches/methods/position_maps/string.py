"""STRING: distant tokens take the well-trained short distances.

An et al., arXiv:2410.18745; code HKUNLP/STRING. The released prefill counts the key at distance S
in both of its branches. The released decoding does not; here the key is in one.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from patches.encoding.bands import IDENTITY, Band
from patches.encoding.fields import LONGEST
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import DistanceRange
from patches.encoding.method import BasedMethod
from patches.encoding.positions import Shifted
from patches.encoding.recipe import Recipe


class String(BasedMethod):
    summary: ClassVar[str] = "STRING: distances from an offset on are shifted down onto well-trained short ones."
    use: ClassVar[str] = "Long-context models that fail below their trained length."
    avoid: ClassVar[str] = "Extension far past L0: it adds only S - W tokens."
    reach: ClassVar[str] = "L0 + S - W"
    evidence: ClassVar[str] = (
        "Published for retrieval inside the trained length (arXiv:2410.18745), not for perplexity."
    )
    formula: ClassVar[str] = "p - j below S; from S on: p - j - S + W"
    paper: ClassVar[str] = "STRING, arXiv:2410.18745"
    training_free: ClassVar[str] = "Made for use without tuning, at lengths up to the trained one."
    cost: ClassVar[str] = "two attentions over disjoint pairs"

    method: Literal["string"] = "string"
    shifted_offset: Annotated[int, Field(ge=1, le=LONGEST, strict=True)] | None = Field(
        None, description="Distance S from which on distances are shifted; a third of the trained length when absent."
    )
    small_local_value: Annotated[int, Field(ge=0, le=LONGEST, strict=True)] | None = Field(
        None,
        description="Distance W that S becomes, at most S; when absent 128, or a quarter of S where that is less.",
    )

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        offset, local = self.offset(geometry), self.local(geometry)
        if local > offset:
            raise ValueError(f"small_local_value: must be between 0 and shifted_offset, here {offset}")
        near = Band(predicate=DistanceRange(0, offset))
        far = Band(Shifted(local - offset), IDENTITY, DistanceRange(offset))
        return self.on_base(geometry, near, far)

    def stretched(self, trained: int, geometry: RopeGeometry) -> int | None:
        return max(trained, trained + self.offset(geometry) - self.local(geometry))

    def offset(self, geometry: RopeGeometry) -> int:
        return self.shifted_offset or max(1, self.attended(geometry) // 3)

    def local(self, geometry: RopeGeometry) -> int:
        return min(128, self.offset(geometry) // 4) if self.small_local_value is None else self.small_local_value

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        in_effect = {"shifted_offset": self.offset(geometry), "small_local_value": self.local(geometry)}
        return super().parameters(geometry) | in_effect
