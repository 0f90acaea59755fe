"""Student's t: intervals of means, and probabilities, that hold for few values too (Student 1908, Biometrika 6).

Its distribution is the finite series for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

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


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean of ``values`` [n], n at least 2, around their mean."""
    return quantile(len(values) - 1) * _error(values)


def probability_above(values: np.ndarray) -> float:
    """Probability that the true mean of ``values`` [n], n at least 2, is above 0. Equal values are sure."""
    mean, error = float(values.mean()), _error(values)
    if error == 0:
        return 0.5 * (1 + float(np.sign(mean)))
    return distribution(mean / error, len(values) - 1)


def _error(values: np.ndarray) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))
