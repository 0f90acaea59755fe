"""The checkpoint's own encoding: plain RoPE unless it ships another (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import FrequencyMethod, Method
from patches.encoding.recipe import Recipe
from patches.encoding.schedule import UnscaledSchedule


class Default(FrequencyMethod):
    also: ClassVar[tuple[str, ...]] = ("rope", "native", "own")
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

    def is_native(self, geometry: RopeGeometry) -> bool:
        return geometry.native is not None and self.rope_theta is None

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        theta = self.theta(geometry)  # checks the model's rotated share, whatever the base
        if isinstance(geometry.native, Method) and self.is_native(geometry):
            return geometry.native.recipe(geometry)
        return Recipe(UnscaledSchedule(theta))

    def extension(self, geometry: RopeGeometry) -> float | None:
        if isinstance(geometry.native, Method) and self.is_native(geometry):
            return geometry.native.extension(geometry)
        return 1.0 if self.rope_theta is None else None  # another base names no length

    def reached(self, geometry: RopeGeometry) -> int | None:
        if isinstance(geometry.native, Method) and self.is_native(geometry):
            return geometry.native.reached(geometry)
        return super().reached(geometry)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        if not self.is_native(geometry):
            return super().parameters(geometry)
        given = {"rope_theta": None, "partial_rotary_factor": self.partial_rotary_factor}
        return super().parameters(geometry) | given  # a base would ask for plain RoPE
