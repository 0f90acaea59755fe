"""Do 95 % intervals separate two scores? Over the same tokens that of their ratio, over others those of both."""

from __future__ import annotations

import math
from itertools import combinations

from service.evaluation.scores import Group, Score, Scores
from service.evaluation.statistics.per_token import are_paired, surely_apart

BY_RATIO = "Perplexities are compared by the interval of their ratio, which is usually narrower"
"""For readers who see the intervals of both."""

BY_RATIO_IN_SHORT = "verdicts go by the interval of the ratio"
"""For a line that has room for no more."""


def ratio_note(scores: Scores) -> str:
    """``BY_RATIO`` where two methods have intervals over the same tokens, else nothing."""
    at_each = ([by[length] for by in scores.by_method if length in by] for length in scores.lengths())
    pairs = (pair for found in at_each for pair in combinations(found, 2))
    return BY_RATIO if any(is_by_ratio(*pair) for pair in pairs) else ""


def verdict_note(*, by_ratio: bool, doubtful: bool, short: bool = False) -> str:
    """The sentence below verdicts, of which ``doubtful`` ones end in a question mark; it may be empty."""
    if by_ratio:
        return (BY_RATIO_IN_SHORT if short else BY_RATIO) + ('; "?": it does not decide' if doubtful else "")
    return '"?": 95 % intervals do not decide' if doubtful else ""


def is_by_ratio(score: Score, other: Score, *, same_tokens: bool = True) -> bool:
    """True if ``are_apart`` goes by the ratio, and readers see another interval of ``score``."""
    return score.interval is not None and pieces_of_both(score, other, same_tokens=same_tokens) is not None


def are_apart(score: Score, other: Score, factor: float = 1.0, *, same_tokens: bool = True) -> bool:
    """True if intervals separate ``score`` from ``factor`` times ``other``.

    With ``same_tokens`` and equal pieces, it is the interval of their ratio. So hard text costs no certainty.
    """
    pieces = pieces_of_both(score, other, same_tokens=same_tokens)
    return _by_both_intervals(score, other, factor) if pieces is None else surely_apart(*pieces, factor)


def pieces_of_both(score: Score, other: Score, *, same_tokens: bool) -> tuple[list[Group], list[Group]] | None:
    """The pieces of both, where they are of the same tokens."""
    a, b = score.pieces, other.pieces
    return (a, b) if same_tokens and a is not None and b is not None and are_paired(a, b) else None


def _by_both_intervals(score: Score, other: Score, factor: float) -> bool:
    """Independent intervals (Zou and Donner 2008, Statistics in Medicine 27, p. 1693-1702). False without both."""
    own, others = score.interval, other.interval
    if own is None or others is None:
        return False
    gap = score.value - factor * other.value
    if gap > 0:
        return gap >= math.hypot(score.value - own.low, factor * (others.high - other.value))
    return -gap >= math.hypot(own.high - score.value, factor * (other.value - others.low))
