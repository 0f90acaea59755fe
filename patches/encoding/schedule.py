"""Frequency schedules: what they return, and the ones that more than one method uses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from patches.encoding.geometry import RopeGeometry
from patches.encoding.rotary import base_inv_freq

if TYPE_CHECKING:
    import torch


class Frequencies(NamedTuple):
    """``inv_freq`` [rotary_dim / 2], the factor on cos and sin, and the base in effect."""

    inv_freq: torch.Tensor
    attention_factor: float
    rope_theta: float


class Schedule(Protocol):
    """Geometry and reserved length (tokens, prompt + max_new_tokens) -> frequencies in float32 or float64.

    float32 is what a model is served with, computed as transformers computes it. float64 is for schedules that round.
    """

    @property
    def depends_on_length(self) -> bool: ...

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies: ...


class RopeType(StrEnum):
    """Kinds of scaling by their names in transformers' ``rope_parameters`` (5.24), which other systems read too."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"


@runtime_checkable
class NamedSchedule(Schedule, Protocol):
    """A schedule that transformers has too."""

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any] | None:
        """transformers' object for a reserved length in tokens; None where it has none after all.

        ``attention_factor`` is an entry exactly where the type takes one.
        """
        ...


def chooses_pairs(schedule: Schedule) -> bool:
    """True if a schedule, or the one inside it, decides itself which pairs rotate."""
    inner = getattr(schedule, "schedule", None)
    return getattr(schedule, "decides_on_pairs", False) or (inner is not None and chooses_pairs(inner))


def _is_final(schedule: Schedule) -> bool:
    """True if a schedule, or the one inside it, gives frequencies with learned factors, or a list that has none."""
    inner = getattr(schedule, "schedule", None)
    return getattr(schedule, "is_final", False) or (inner is not None and _is_final(inner))


def with_learned(frequencies: torch.Tensor, schedule: Schedule, geometry: RopeGeometry) -> torch.Tensor:
    """``frequencies`` of ``schedule``, times the factors that the model learned unless they are final."""
    import torch

    learned = geometry.learned_factors
    return frequencies if learned is None or _is_final(schedule) else frequencies * torch.tensor(learned)


@dataclass(frozen=True)
class UnscaledSchedule:
    """rope_theta^(-2i/d), whatever the length."""

    rope_theta: float
    depends_on_length: bool = False

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        return Frequencies(base_inv_freq(self.rope_theta, geometry.rotary_dim, dtype), 1.0, self.rope_theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any]:
        return {"rope_type": RopeType.DEFAULT, "rope_theta": self.rope_theta}


@dataclass(frozen=True)
class WrappingSchedule:
    """Base of schedules that change what another one gives."""

    schedule: Schedule

    @property
    def depends_on_length(self) -> bool:
        return self.schedule.depends_on_length


@dataclass(frozen=True)
class TemperedSchedule(WrappingSchedule):
    """Another schedule with its factor on cos and sin multiplied by ``factor``."""

    factor: float

    def frequencies(self, geometry: RopeGeometry, length: int, dtype: torch.dtype) -> Frequencies:
        inv_freq, attention_factor, rope_theta = self.schedule.frequencies(geometry, length, dtype)
        return Frequencies(inv_freq, attention_factor * self.factor, rope_theta)

    def rope_parameters(self, geometry: RopeGeometry, length: int) -> dict[str, Any] | None:
        inner = self.schedule
        return inner.rope_parameters(geometry, length) if isinstance(inner, NamedSchedule) else None
