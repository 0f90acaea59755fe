"""Schedules that more than one method uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from patches.encoding.recipe import Frequencies, RopeGeometry, Schedule
from patches.encoding.rotary import base_inv_freq

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class UnscaledSchedule:
    """rope_theta^(-2i/d), whatever the length."""

    rope_theta: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        return Frequencies(base_inv_freq(self.rope_theta, geometry.rotary_dim, dtype), 1.0, self.rope_theta)


@dataclass(frozen=True)
class TemperedSchedule:
    """Another schedule with its factor on cos and sin multiplied by ``factor``."""

    schedule: Schedule
    factor: float

    @property
    def depends_on_length(self) -> bool:
        return self.schedule.depends_on_length

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        inv_freq, attention_factor, rope_theta = self.schedule.frequencies(geometry, length, dtype)
        return Frequencies(inv_freq, attention_factor * self.factor, rope_theta)
