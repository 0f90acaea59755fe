"""The checkpoint's own encoding, and no encoding at all.

RoFormer (arXiv:2104.09864); NoPE (arXiv:2305.19466).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from patches.method import FrequencyMethod, Method
from patches.recipe import Family, Recipe, RopeGeometry
from patches.schedule import UnscaledSchedule


class Default(FrequencyMethod):
    summary: ClassVar[str] = "The encoding the checkpoint was trained with (plain RoPE unless it ships a scaling)."
    use: ClassVar[str] = (
        "The baseline: what the checkpoint does on its own. With rope_theta, plain RoPE at another base "
        "(Code Llama: 1e6)."
    )
    avoid: ClassVar[str] = "Reading past the trained length."
    reach: ClassVar[str] = "L0"
    evidence: ClassVar[str] = "Llama-2-7B, PG19: 7.87 at 4k, over 100 at 8k (arXiv:2402.17463, table 1)."
    formula: ClassVar[str] = "theta_i = b^(-2i/d)"
    paper: ClassVar[str] = "RoFormer, arXiv:2104.09864"
    training_free: ClassVar[str] = "Exact up to the trained length; degrades sharply past it."

    method: Literal["default"] = "default"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        if self.rope_theta is not None:
            return Recipe(UnscaledSchedule(self.theta(geometry)))
        if geometry.native is not None:
            return geometry.native.recipe(geometry)
        return Recipe(UnscaledSchedule(self.theta(geometry)) if geometry.rotates else None)


class NoPositions(Method):
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
    rotates_at: ClassVar[str] = "never"
    family: ClassVar[Family] = "none"

    method: Literal["none"] = "none"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        return Recipe(schedule=None)
