"""The checkpoint's own encoding, and no encoding at all.

RoFormer (arXiv:2104.09864); NoPE (arXiv:2305.19466); its attention temperature (arXiv:2404.12224).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from patches.method import FrequencyMethod, Method
from patches.recipe import Recipe, RopeGeometry
from patches.schedule import UnscaledSchedule
from patches.temperature import ConstantTemperature


class Default(FrequencyMethod):
    summary: ClassVar[str] = "The encoding the checkpoint was trained with (plain RoPE unless it ships a scaling)."
    paper: ClassVar[str] = "RoFormer, arXiv:2104.09864"
    training_free: ClassVar[str] = "Exact up to the trained length; degrades sharply past it."
    cost: ClassVar[str] = "none"

    method: Literal["default"] = "default"

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(UnscaledSchedule(self.theta(geometry)))


class NoPositions(Method):
    summary: ClassVar[str] = "No rotation and no bias (NoPE): order is known only through the causal mask."
    paper: ClassVar[str] = "NoPE, arXiv:2305.19466; temperature arXiv:2404.12224"
    training_free: ClassVar[str] = (
        "For models trained or recalibrated without rotation; on a stock RoPE model a negative control."
    )
    cost: ClassVar[str] = "none"
    rotates_at: ClassVar[str] = "never"

    method: Literal["none"] = "none"
    attention_temperature: Annotated[float, Field(gt=0.0, le=10.0, strict=True)] = Field(
        1.0, description="Multiplies every attention score (UniformScale: 1.2 to 1.8 for longer inputs)."
    )

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        if self.attention_temperature == 1.0:
            return Recipe(schedule=None)
        return Recipe(None, attention_temperature=ConstantTemperature(self.attention_temperature))
