"""Intervals of proportions."""

from __future__ import annotations

import math

from service.evaluation.scores import Interval

Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


def wilson(successes: int, trials: int) -> Interval:
    """95 % interval of ``successes`` out of ``trials`` independent ones (Wilson 1927, Journal of the American
    Statistical Association 22, p. 209-212).

    Raises:
        ValueError: without a trial, or with successes that are not among them.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials")
    share, z2 = successes / trials, Z * Z / trials
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4) / (1 + z2)
    # The ends are 0 and 1 exactly where nothing or everything succeeded, which rounding would miss.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(low=low, high=high, kind="samples")
