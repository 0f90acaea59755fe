"""Do 95 % intervals separate two scores? Over the same tokens that of their ratio, over others those of both."""

from __future__ import annotations

import math

from service.evaluation.results import Score
from service.evaluation.statistics import are_paired, surely_apart


def are_apart(score: Score, other: Score, factor: float = 1.0, *, same_tokens: bool = True) -> bool:
    """True if intervals separate ``score`` from ``factor`` times ``other``.

    With ``same_tokens`` and equal pieces, it is the interval of their ratio. So hard text costs no certainty.
    """
    a, b = score.pieces, other.pieces
    if same_tokens and a is not None and b is not None and are_paired(a, b):
        return surely_apart(a, b, factor)
    return _by_both_intervals(score, other, factor)


def _by_both_intervals(score: Score, other: Score, factor: float) -> bool:
    """Independent intervals (Zou and Donner 2008, Statistics in Medicine 27, p. 1693-1702). False without both."""
    own, others = score.interval, other.interval
    if own is None or others is None:
        return False
    gap = score.value - factor * other.value
    if gap > 0:
        return gap >= math.hypot(score.value - own.low, factor * (others.high - other.value))
    return -gap >= math.hypot(own.high - score.value, factor * (other.value - others.low))
