"""Attention temperatures: multipliers on the whole score, possibly by query position."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ConstantTemperature:
    """The same multiplier for every query."""

    multiplier: float

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        return torch.full(q_idx.shape, self.multiplier, dtype=torch.float32, device=q_idx.device)


@dataclass(frozen=True)
class LogLengthTemperature:
    """max(1, ln(p + 1) / ln(trained_length)) for the query at position p (Su, log-n scaling)."""

    trained_length: int

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        return (torch.log(q_idx.float() + 1.0) / math.log(self.trained_length)).clamp_min(1.0)
