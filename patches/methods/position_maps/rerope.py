"""ReRoPE and Leaky ReRoPE: exact distances inside a window, one distance or a slower clock beyond it.

Su 2023, kexue.fm/archives/9708; code in bojone/rerope, which also multiplies scores by log-n: here that
is ``attention_temperature``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from patches.encoding.bands import Band
from patches.encoding.fields import MOST_FACTOR
from patches.encoding.geometry import RopeGeometry
from patches.encoding.masks import DistanceRange
from patches.encoding.method import BasedMethod
from patches.encoding.positions import Fixed, Stretched
from patches.encoding.recipe import Recipe


class _WindowMethod(BasedMethod):
    """Shared part of the two: a window, and two attentions over disjoint pairs."""

    cost: ClassVar[str] = "keys in the window are rotated when read; two attentions over disjoint pairs"
    paper: ClassVar[str] = "Su 2023, kexue.fm/archives/9708"
    rotates_at: ClassVar[str] = "cache_read"

    window: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] | None = Field(
        None,
        description="Distance below which positions stay exact; a quarter of the trained length when absent. Best from "
        "a quarter to a half of it, useless at the whole.",
    )

    def window_in_effect(self, geometry: RopeGeometry) -> int:
        return self.window or max(1, self.attended(geometry) // 4)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"window": self.window_in_effect(geometry)}


class ReRope(_WindowMethod):
    summary: ClassVar[str] = "ReRoPE: exact distances inside a window, every key beyond it at the window's distance."
    use: ClassVar[str] = "Untuned extension to any length, best with attention_temperature log_n."
    avoid: ClassVar[str] = "Tasks that need the order of distant tokens: they all look equally far."
    reach: ClassVar[str] = "any length: no distance exceeds the window"
    evidence: ClassVar[str] = (
        "Llama-2-7B untuned, PG19: 7.94 / 7.75 at 4k / 8k (arXiv:2402.17463, table 1). Its author's 100M model, "
        "trained at 512, read at 4096: next-token accuracy 47.82 % with window 128, 8.25 % with window 512."
    )
    formula: ClassVar[str] = "min(p - j, w)"
    training_free: ClassVar[str] = "Works without tuning at any length, with a window of a quarter to a half of L0."

    method: Literal["rerope"] = "rerope"

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        """Both windows that its author advises, and the temperature that he adds."""
        half = max(1, geometry.original_max_position_embeddings // 2)
        return [cls(), cls(window=half), cls.model_validate({"attention_temperature": "log_n"})]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        window = self.window_in_effect(geometry)
        near = Band(predicate=DistanceRange(0, window))
        far = Band(Fixed(window), Fixed(0), DistanceRange(window))
        return self.on_base(geometry, near, far)


class LeakyReRope(_WindowMethod):
    summary: ClassVar[str] = "Leaky ReRoPE: exact distances inside a window, interpolated distances beyond it."
    use: ClassVar[str] = "Untuned extension that keeps the order of distant tokens."
    avoid: ClassVar[str] = "Unbounded lengths: beyond its reach distances are untrained again."
    reach: ClassVar[str] = "(L0 - 1 - w) x scaling_factor + w + 1"
    evidence: ClassVar[str] = "Released beside ReRoPE (bojone/rerope); the published figures are ReRoPE's."
    formula: ClassVar[str] = "p - j below w; beyond: w + (p - j - w) / scaling_factor"
    training_free: ClassVar[str] = "Works without tuning up to its reach; fractional distances were never trained on."

    method: Literal["leaky_rerope"] = "leaky_rerope"
    scaling_factor: Annotated[float, Field(ge=1.0, le=4096.0, strict=True)] = Field(
        16.0, description="Division of distances beyond the window."
    )

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        """The divisor that reaches ``length``, and twice that."""
        trained = geometry.original_max_position_embeddings
        window = max(1, trained // 4)
        needed = max(1, math.ceil((length - window - 1) / max(1, trained - window - 1)))
        return [cls(scaling_factor=min(float(multiple * needed), MOST_FACTOR)) for multiple in (1, 2)]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        window, factor = self.window_in_effect(geometry), self.scaling_factor
        near = Band(predicate=DistanceRange(0, window))
        far = Band(Stretched(factor, window * (factor - 1)), Stretched(factor), DistanceRange(window))
        return self.on_base(geometry, near, far)

    def stretched(self, trained: int, geometry: RopeGeometry) -> int | None:
        window = self.window_in_effect(geometry)
        return max(trained, int((trained - 1 - window) * self.scaling_factor) + window + 1)
