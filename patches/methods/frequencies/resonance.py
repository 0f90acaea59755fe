"""Resonance RoPE: wavelengths rounded to whole tokens, so that every pair repeats itself exactly.

Wang et al., arXiv:2403.00071, section 4. Rounding is a jump. The schedule underneath is asked for float64, because
float32 frequencies put one wavelength in thirty on another integer. Angles are not reduced modulo the wavelength:
the same rotation, up to the rounding of float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import WrappingMethod
from patches.encoding.recipe import Recipe
from patches.encoding.schedule import Frequencies, WrappingSchedule, with_learned

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ResonanceSchedule(WrappingSchedule):
    """Another schedule with its wavelengths 2 pi / f rounded; pairs that do not rotate stay still."""

    is_final: ClassVar[bool] = True

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        import torch

        inv_freq, attention_factor, rope_theta = self.schedule.frequencies(geometry, length, torch.float64)
        wavelength = (2 * math.pi / with_learned(inv_freq, self.schedule, geometry)).round()
        return Frequencies((2 * math.pi / wavelength).to(dtype), attention_factor, rope_theta)


class Resonance(WrappingMethod):
    summary: ClassVar[str] = "Resonance RoPE: wavelengths of any schedule rounded to whole tokens."
    use: ClassVar[str] = "A refinement of yarn and other schedules, at no cost."
    avoid: ClassVar[str] = "Extension by itself: it needs a schedule that extends underneath."
    reach: ClassVar[str] = "that of the schedule underneath"
    evidence: ClassVar[str] = "Small gains over yarn in language modelling and on PosGen (arXiv:2403.00071)."
    formula: ClassVar[str] = "theta_i' = 2 pi / round(2 pi / theta_i)"
    paper: ClassVar[str] = "Resonance RoPE, arXiv:2403.00071"
    training_free: ClassVar[str] = "Changes the fastest pairs most (by up to 5 %), which untuned weights notice."

    method: Literal["resonance"] = "resonance"

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        recipe = self.on_base(geometry)
        assert recipe.schedule is not None  # on_base refuses what rotates nothing
        return replace(recipe, schedule=ResonanceSchedule(recipe.schedule))
