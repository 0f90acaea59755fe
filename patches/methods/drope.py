"""DroPE: rotation dropped after training, the scores of longer inputs sharpened by one temperature.

Gelberg et al., arXiv:2512.12167. The weights must have been recalibrated without rotation, at their own length.
The temperature at inference is 1 + c ln s on the product q . k. The default c = 0.41 is not confirmed by released code.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from patches.encoding.fields import Factor
from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe
from patches.encoding.temperature import ConstantTemperature


class Drope(Method):
    summary: ClassVar[str] = "DroPE: no rotation, and a temperature that grows with the extension factor."
    use: ClassVar[str] = "Checkpoints recalibrated without rotation (SakanaAI's DroPE models)."
    avoid: ClassVar[str] = (
        "Any other checkpoint: without recalibration it is a negative control that destroys the model."
    )
    reach: ClassVar[str] = "factor x L0, published up to 8 x L0"
    evidence: ClassVar[str] = (
        "SmolLM-360M recalibrated, needle in a haystack at 2x / 4x / 8x: 74.92 / 55.0 / 52.2, against 48.25 / 25.62 / "
        "12.18 of YaRN (arXiv:2512.12167)."
    )
    formula: ClassVar[str] = "score = (1 + c ln s) q . k / sqrt(d_h), c the coefficient"
    paper: ClassVar[str] = "DroPE, arXiv:2512.12167"
    training_free: ClassVar[str] = "A negative control on weights that were not recalibrated without rotation."
    family: ClassVar[Family] = "none"

    method: Literal["drope"] = "drope"
    factor: Factor = Field(1.0, description="Extension factor s: the multiplier of scores is 1 + coefficient ln s.")
    coefficient: Annotated[float, Field(gt=0.0, le=10.0, strict=True)] = Field(
        0.41, description="Weight c of the logarithm."
    )

    @model_validator(mode="after")
    def _temperature_once(self) -> Self:
        if self.factor > 1.0 and self.attention_temperature is not None:
            raise ValueError("attention_temperature: factor sets it already; give one of the two")
        return self

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        return {"factor": float(times)}

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        multiplier = 1.0 + self.coefficient * math.log(self.factor)
        return Recipe(None, attention_temperature=ConstantTemperature(multiplier) if multiplier > 1.0 else None)
