"""The schedule that scales nothing, shared by every method that moves positions instead."""

from __future__ import annotations

from dataclasses import dataclass

from patches.recipe import Frequencies, RopeGeometry
from patches.rotary import base_inv_freq


@dataclass(frozen=True)
class UnscaledSchedule:
    """rope_theta^(-2i/d), whatever the length."""

    rope_theta: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int) -> Frequencies:
        return Frequencies(base_inv_freq(self.rope_theta, geometry.rotary_dim), 1.0, self.rope_theta)
