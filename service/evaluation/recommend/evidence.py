"""The windows that a candidate has read at one length, and comparisons of two candidates window by window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from service.evaluation.recommend.results import AtLength, RecallShown
from service.evaluation.scores import Interval
from service.evaluation.scoring.places import Places
from service.evaluation.statistics.per_token import finite_exp
from service.evaluation.statistics.student import Mean, mean_of
from service.evaluation.unit import Outcome

TWICE = 2
"""Windows of a document whose mean varies twice as much as that of many."""

LEAST_GAIN = 0.02
"""Share of repeated tokens: a model that gains less from the repeat cannot show which encoding forgets."""


class Difference(NamedTuple):
    """``mean`` loss of one candidate above that of another over shared windows, with its 95 % interval.

    ``probability`` is that of a lower loss of the other. Both are None for fewer than three pieces of text.
    """

    mean: float
    interval: Interval | None
    probability: float | None

    @property
    def is_tie(self) -> bool:
        """True if the windows do not separate the two; too few separate nothing."""
        return self.mean <= 0 or self.interval is None or self.interval.low <= 0

    def is_below(self, limit: float) -> bool:
        """True if the whole interval is."""
        return self.interval is not None and self.interval.high <= limit


@dataclass(frozen=True)
class Evidence:
    """Means of each window, float64 [windows]: ``nll`` in nats, and ``late``, that of its late tokens.

    ``recall`` and ``first`` are the shares of repeated tokens, and of their first occurrence, that the model predicts.
    ``recall_counts``: recall is a part of the loss. The windows lie at the first ``places``.
    """

    nll: np.ndarray
    late: np.ndarray
    recall: np.ndarray
    first: np.ndarray
    recall_counts: bool
    places: Places

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], places: Places, *, recall_counts: bool) -> Evidence:
        """Of one candidate's outcomes at one length, in the order of the windows."""
        return cls(
            np.array([outcome["nll"].mean() for outcome in outcomes]),
            np.array([outcome["nll_late"].mean() for outcome in outcomes]),
            np.array([(outcome["ranks"] == 1).mean() for outcome in outcomes]),
            np.array([(outcome["ranks_first"] == 1).mean() for outcome in outcomes]),
            recall_counts,
            places,
        )

    @property
    def losses(self) -> np.ndarray:
        """NLL, plus the share of repeated tokens that are not copied: a nat weighs as much as all of them."""
        return self.nll + (1 - self.recall) if self.recall_counts else self.nll

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def loss_of_round(self) -> float:
        """The loss with ``late``, which decides who goes on. Few windows have more late tokens than last ones."""
        return self.loss + float((self.late - self.nll).mean())

    def above(self, other: Evidence) -> Difference:
        """The difference to ``other`` over the windows that both have read."""
        shared = min(len(self.nll), len(other.nll))
        more = self.losses[:shared] - other.losses[:shared]
        found = self._mean(more)
        return Difference(float(more.mean()), self._interval(more), None if found is None else found.above)

    def at(self, length: int, best: Evidence, tolerance: float) -> AtLength:
        """The numbers at ``length`` tokens, compared with the best one there."""
        above, nll = self.above(best), self._interval(self.nll)
        if nll is not None:
            nll = nll.model_copy(update={"low": finite_exp(nll.low), "high": finite_exp(nll.high)})
        return AtLength(
            length=length,
            windows=len(self.nll),
            perplexity=finite_exp(float(self.nll.mean())),
            perplexity_interval=nll,
            recall=float(self.recall.mean()),
            recall_interval=self._interval(self.recall, most=1.0),
            recall_first=float(self.first.mean()),
            loss=self.loss,
            difference=above.mean,
            difference_interval=above.interval,
            good_enough=above.mean <= tolerance,
        )

    def gained(self) -> Interval | None:
        """95 % interval of the share of repeated tokens that the model predicts for the repeat alone."""
        return self._interval(self.recall - self.first)

    def _mean(self, values: np.ndarray) -> Mean | None:
        """Mean of ``values`` float64 [n] of the first n windows. None for fewer than three pieces of text."""
        return mean_of(self.places.groups(values), TWICE)

    def _interval(self, values: np.ndarray, most: float = math.inf) -> Interval | None:
        """95 % interval of that mean, within 0 and ``most`` where that is finite."""
        found = self._mean(values)
        if found is None:
            return None
        low, high = found.value - found.half, found.value + found.half
        if math.isfinite(most):
            low, high = max(0.0, low), min(most, high)
        return Interval(low=low, high=high, kind=self.places.kind(len(values)))


def copies(reference: Evidence) -> RecallShown:
    """``yes`` if the model surely predicts repeated tokens better than the same tokens where nothing repeats."""
    gained = reference.gained()
    if gained is None or gained.low <= LEAST_GAIN < gained.high:
        return "unsure"
    return "yes" if gained.low > LEAST_GAIN else "no"
