"""Shared arithmetic of the methods that treat frequencies by how often they turn in the trained window."""

from __future__ import annotations

import math

import torch


def pair_turning(turns: float, rotary_dim: int, rope_theta: float, trained_length: int) -> float:
    """The (fractional) pair index whose rotation turns ``turns`` times over the trained length."""
    return (rotary_dim * math.log(trained_length / (turns * 2 * math.pi))) / (2 * math.log(rope_theta))


def pair_range(
    first_turns: float,
    last_turns: float,
    *,
    rotary_dim: int,
    rope_theta: float,
    trained_length: int,
    truncate: bool = True,
) -> tuple[float, float]:
    """Pair indices between two numbers of turns, rounded outwards if ``truncate``, inside [0, d - 1]."""
    low = pair_turning(first_turns, rotary_dim, rope_theta, trained_length)
    high = pair_turning(last_turns, rotary_dim, rope_theta, trained_length)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, rotary_dim - 1)


def linear_ramp(low: float, high: float, pairs: int) -> torch.Tensor:
    """0 up to index ``low``, 1 from ``high``, linear between: float32 [pairs]."""
    if low == high:
        high += 0.001  # the value transformers and the YaRN code use against the division by zero
    return ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
