"""A toy method for ``test_adding``: every frequency divided by the square root of the factor."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from patches.encoding.fields import Factor
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import FrequencyMethod
from patches.encoding.recipe import Recipe
from patches.methods.frequencies.linear import LinearSchedule


class RootStretched(FrequencyMethod):
    summary: ClassVar[str] = "Squeezes positions by the square root of the factor."
    use: ClassVar[str] = "Tests."
    avoid: ClassVar[str] = "Everything else."
    reach: ClassVar[str] = "sqrt(factor) x L0"
    evidence: ClassVar[str] = "none"
    formula: ClassVar[str] = "theta_i' = theta_i / sqrt(s)"
    paper: ClassVar[str] = "none"
    training_free: ClassVar[str] = "As linear with the root of its factor."
    multiples: ClassVar[tuple[float, ...]] = (1.0,)

    method: Literal["root_stretched"] = "root_stretched"
    factor: Factor = Field(description="The square of the divisor.")

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(LinearSchedule(self.theta(geometry), self.factor**0.5))
