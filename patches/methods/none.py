"""No encoding at all (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe


class NoPositions(Method):
    also: ClassVar[tuple[str, ...]] = ("nope", "no_positional_encoding")
    summary: ClassVar[str] = "No rotation and no bias (NoPE): order is known only through the causal mask."
    use: ClassVar[str] = "Models trained or recalibrated without rotation; elsewhere a negative control."
    avoid: ClassVar[str] = "A stock rotary checkpoint whose answers matter."
    reach: ClassVar[str] = "a little past L0; further with a temperature"
    evidence: ClassVar[str] = "NoPE-trained models generalize to longer inputs than rotary ones (arXiv:2305.19466)."
    formula: ClassVar[str] = "score = q . k"
    paper: ClassVar[str] = "NoPE, arXiv:2305.19466"
    training_free: ClassVar[str] = (
        "For models trained or recalibrated without rotation; on a stock RoPE model a negative control."
    )
    family: ClassVar[Family] = "none"

    method: Literal["none"] = "none"

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        return [cls.model_validate({"attention_temperature": "log_n"})]

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(schedule=None)
