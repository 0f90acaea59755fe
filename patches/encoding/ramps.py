"""Shared parts of methods that treat each frequency by its number of turns over the trained length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from patches.encoding.fields import Turns
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import TrainedLengthMethod

if TYPE_CHECKING:
    import torch


def pair_turning(turns: float, rotary_dim: int, rope_theta: float, trained_length: int) -> float:
    """The (fractional) pair index whose rotation turns ``turns`` times over the trained length."""
    return (rotary_dim * math.log(trained_length / (turns * 2 * math.pi))) / (2 * math.log(rope_theta))


def linear_ramp(low: float, high: float, pairs: int, dtype: torch.dtype) -> torch.Tensor:
    """0 up to index ``low``, 1 from ``high``, linear between: ``dtype`` [pairs]."""
    import torch

    if low == high:
        high += 0.001  # the value transformers and the YaRN code use against the division by zero
    return ((torch.arange(pairs, dtype=dtype) - low) / (high - low)).clamp(0, 1)


def turns_of(inv_freq: torch.Tensor, trained_length: int) -> torch.Tensor:
    """Turns of every pair over the trained length: float64 [pairs]."""
    return inv_freq.double() * trained_length / (2 * math.pi)


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on cos and sin: 0.1 x weight x ln(factor) + 1, or 1 up to factor 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class TurnRange:
    """The range of turns over the trained length in which pairs go from unscaled to fully scaled. ``fields`` are the
    names of its ends in a request."""

    rope_theta: float
    trained_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool = True
    fields: tuple[str, str] = ("beta_fast", "beta_slow")

    def pairs(self, rotary_dim: int) -> tuple[float, float]:
        """First and last pair index of the range, rounded outwards if ``truncate``, inside [0, rotary_dim - 1].

        Raises:
            ValueError: when every pair turns more often, or less. The released code would scale all or none of them.
        """
        first, last = (
            pair_turning(turns, rotary_dim, self.rope_theta, self.trained_length)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        if first > last:
            bound, turns, than = (
                (self.fields[1], self.beta_slow, "fewer") if last < 0 else (self.fields[0], self.beta_fast, "more")
            )
            raise ValueError(
                f"{bound}: {turns:g} is out of reach, since every pair makes {than} turns at "
                f"original_max_position_embeddings {self.trained_length} and rope_theta {self.rope_theta:g}"
            )
        return first, last


class TurnRangeMethod(TrainedLengthMethod):
    """A method that keeps fast pairs, fully scales slow ones and blends those between by their index."""

    beta_fast: Turns = Field(32.0, description="Turns above which a pair is left alone.")
    beta_slow: Turns = Field(1.0, description="Turns below which a pair is fully interpolated.")
    truncate: bool = Field(True, strict=True, description="Round the range of blended pairs outwards (gpt-oss: false).")

    @model_validator(mode="after")
    def _fast_above_slow(self) -> Self:
        if self.beta_fast < self.beta_slow:  # equal ones make a step (Kimi K2)
            raise ValueError("beta_fast must be at least beta_slow")
        return self

    def turn_range(self, geometry: RopeGeometry) -> TurnRange:
        """Raises:
        ValueError: when no pair lies in the range.
        """
        turns = TurnRange(
            self.theta(geometry), self.trained_length(geometry), self.beta_fast, self.beta_slow, self.truncate
        )
        turns.pairs(geometry.rotary_dim)
        return turns
