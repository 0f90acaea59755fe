"""From the losses of windows to the numbers of each method, and of the search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from patches import factors_of
from service.evaluation.recommend.evidence import TWICE
from service.evaluation.scores import Interval
from service.evaluation.scoring.places import Places
from service.evaluation.search.evolution import Individual
from service.evaluation.search.results import FOUND, HeldOut, SearchMethod
from service.evaluation.statistics.per_token import finite_exp
from service.evaluation.statistics.student import mean_of
from service.evaluation.unit import Outcome, Subject


class Losses(NamedTuple):
    """Mean NLL in nats of each compared method and each individual over the windows of the search.

    ``held_out`` float64 [methods, windows] has that of each later window, first under the individual that was found.
    """

    compared: list[float]
    searched: dict[Individual, float]
    held_out: np.ndarray | None

    @classmethod
    def of(
        cls,
        outcomes: Sequence[Outcome],
        compared: int,
        bred: Sequence[Sequence[Individual]],
        windows: int,
        held_out: int,
    ) -> Losses:
        """Of the outcomes in the order of the plan's units."""
        individuals = [individual for generation in bred for individual in generation]
        nll = np.array([outcome["nll"][0] for outcome in outcomes])
        end = (compared + len(individuals)) * windows
        means = nll[:end].reshape(-1, windows).mean(axis=1).tolist()
        later = nll[end:].reshape(-1, held_out) if len(nll) > end else None
        return cls(means[:compared], dict(zip(individuals, means[compared:], strict=True)), later)


def methods_of(
    subjects: Sequence[Subject], losses: Losses, found: Individual, held_out: Places, target: int
) -> list[SearchMethod]:
    """Every method with its numbers; the first of ``subjects`` has the factors that were ``found``."""
    searched = [losses.searched[found], *losses.compared]
    return [
        SearchMethod(
            **subject.described(target) | ({} if index else {"label": FOUND}),
            request=subject.method.as_request(),
            factors=factors_of(subject.method.at(target), subject.patch.geometry, target),
            search_loss=searched[index],
            held_out=None if losses.held_out is None else _held_out(losses.held_out, index, held_out),
        )
        for index, subject in enumerate(subjects)
    ]


def _held_out(losses: np.ndarray, index: int, places: Places) -> HeldOut:
    own, above = losses[index], losses[index] - losses[0]
    return HeldOut(
        perplexity=finite_exp(float(own.mean())),
        interval=_interval(own, places),
        times_search=finite_exp(float(above.mean())),
        times_search_interval=_interval(above, places) if index else None,
        groups=places.groups(own),
    )


def _interval(values: np.ndarray, places: Places) -> Interval | None:
    """95 % interval of exp(mean), by Student's t over the pieces of text. None for fewer than three."""
    found = mean_of(places.groups(values), TWICE)
    if found is None or not math.isfinite(found.half):
        return None
    ends = (finite_exp(found.value - found.half), finite_exp(found.value + found.half))
    return Interval(low=ends[0], high=ends[1], kind=places.kind(len(values)))
