"""LM-Infinite: a window and the first tokens, which all have one distance.

Han et al., arXiv:2308.16137; code Glaciohound/LM-Infinite (lambda_attention.py), without its
optional attention to a few tokens of the middle.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from patches.encoding.bands import Band
from patches.encoding.fields import LONGEST
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import DistanceRange, FirstKeys
from patches.encoding.method import BasedMethod
from patches.encoding.positions import Fixed
from patches.encoding.recipe import Recipe


class LmInfinite(BasedMethod):
    summary: ClassVar[str] = "LM-Infinite: attends to a window and to the first tokens, those at one fixed distance."
    use: ClassVar[str] = "Fluent text of any length; the plainest case of low perplexity without recall."
    avoid: ClassVar[str] = "Recall: nothing between the first tokens and the window is attended, so it is lost."
    reach: ClassVar[str] = (
        "any length for perplexity, n_local for recall. The released limit_distance puts the first tokens at L0, one "
        "past the trained distances"
    )
    evidence: ClassVar[str] = (
        "Llama-2-7B untuned, PG19: 6.30 / 6.25 / 6.45 / 6.71 at 4k / 8k / 16k / 32k, while RULER falls from 81.05 to "
        "30.01 / 18.02 / 12.34 (arXiv:2409.12181, table 2)."
    )
    formula: ClassVar[str] = "p - j below n_local; limit_distance to the first n_global keys; others not attended"
    paper: ClassVar[str] = "LM-Infinite, arXiv:2308.16137"
    training_free: ClassVar[str] = "Keeps perplexity flat without tuning; does not extend recall."
    cost: ClassVar[str] = "the first keys are rotated when read; prefill and decoding run a second attention over them"
    rotates_at: ClassVar[str] = "cache_read"

    method: Literal["lm_infinite"] = "lm_infinite"
    n_global: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] = Field(
        10, description="First tokens that stay attended (published: 10 to 100)."
    )
    n_local: Annotated[int, Field(ge=1, le=LONGEST, strict=True)] | None = Field(
        None, description="Last tokens attended, the query's own included; the trained length when absent."
    )
    limit_distance: Annotated[int, Field(ge=1, le=LONGEST, strict=True)] | None = Field(
        None, description="Distance of the first tokens, at least n_local - 1; the trained length when absent."
    )

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        return [cls()]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        local, limit = self.local(geometry), self.limit(geometry)
        if limit < local - 1:
            raise ValueError(
                f"limit_distance: must be at least n_local - 1, here {local - 1}: the first tokens cannot be "
                "nearer than the window reaches"
            )
        near = Band(predicate=DistanceRange(0, local))
        first = Band(Fixed(limit), Fixed(0), FirstKeys(self.n_global, local))
        return self.on_base(geometry, near, first)

    def local(self, geometry: RopeGeometry) -> int:
        return self.n_local or self.trained_length(geometry)

    def limit(self, geometry: RopeGeometry) -> int:
        return self.limit_distance or self.trained_length(geometry)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        in_effect = {"n_local": self.local(geometry), "limit_distance": self.limit(geometry)}
        return super().parameters(geometry) | in_effect
