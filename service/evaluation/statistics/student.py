"""Student's t: intervals of means, and probabilities, that hold for few values too (Student 1908, Biometrika 6).

Its distribution is the finite series for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from service.evaluation.scores import Group
from service.evaluation.statistics.pieces import LEAST

SHARE = 0.95
"""Of the samples, that many have the true mean in their interval."""


def distribution(t: float, freedom: int) -> float:
    """Probability that a value of Student's t with ``freedom`` degrees of freedom, at least 1, is below ``t``."""
    angle = math.atan(t / math.sqrt(freedom))
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    odd = freedom % 2
    steps = np.arange(1, freedom // 2, dtype=np.float64)
    ratios = 2 * steps / (2 * steps + 1) if odd else (2 * steps - 1) / (2 * steps)
    series = 1 + float(np.cumprod(ratios * math.cos(angle) ** 2).sum())
    if not odd:
        inside = math.sin(angle) * series
    else:
        inside = 2 / math.pi * (angle + (math.sin(angle) * math.cos(angle) * series if freedom > 1 else 0.0))
    return min(1.0, max(0.0, (1 + inside) / 2))


@lru_cache(maxsize=1024)
def quantile(freedom: int) -> float:
    """The t within which, on both sides of 0, 95 % of the values lie; ``freedom`` degrees of freedom, at least 1."""
    low, high = 1.9, 12.8
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle, freedom) < (1 + SHARE) / 2 else (low, middle)
    return (low + high) / 2


class Mean(NamedTuple):
    """``value`` with its standard ``error``, and the degrees of ``freedom`` of its Student's t."""

    value: float
    error: float
    freedom: int

    @property
    def half(self) -> float:
        """Half of the 95 % interval around the value."""
        return quantile(self.freedom) * self.error

    @property
    def above(self) -> float:
        """Probability that the true mean is above 0. Without an error it is sure."""
        if self.error == 0:
            return 0.5 * (1 + float(np.sign(self.value)))
        return distribution(self.value / self.error, self.freedom)


def mean_of(pieces: Sequence[Group], twice: float) -> Mean | None:
    """Mean of the values of independent pieces of text, each (their sum, their number). None with fewer than three.

    Pieces differ, and short ones vary more: the mean of a piece has a variance in proportion to 1 + twice / size. A
    piece of size ``twice`` has twice that of a long one. The error is that of weighted least squares (Aitken 1935). An
    error from distances to the mean itself is far too small if one piece has most values.
    """
    if len(pieces) < LEAST:
        return None
    sums, sizes = (np.array(column, np.float64) for column in zip(*pieces, strict=True))
    weights, shares = sizes / (sizes + twice), sizes / sizes.sum()
    means = sums / sizes
    centre = float(weights @ means / weights.sum())
    variance = float(weights @ (means - centre) ** 2) / (len(sums) - 1)
    error = math.sqrt(variance * float((shares**2 / weights).sum()))
    return Mean(float(sums.sum() / sizes.sum()), error, len(sums) - 1)
