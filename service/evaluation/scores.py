"""One number per method and length of any evaluation: what tables show first and what a sweep compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from service.evaluation.long_perplexity.results import LongLengthResult, LongPerplexityResult
from service.evaluation.perplexity.results import Group, PerplexityResult
from service.evaluation.probe.results import ProbeResult
from service.evaluation.results import EvaluationResult, Interval
from service.evaluation.retrieval.results import DepthResult
from service.evaluation.ruler.results import RulerResult


class Score(NamedTuple):
    """``groups`` are (NLL sum, tokens) by document or block, for perplexities: methods are compared by pairs."""

    value: float
    interval: Interval | None
    groups: list[Group] | None = None


class Scores(NamedTuple):
    """``by_method`` has one mapping from length to score per method, in the result's order. ``columns`` says what the
    lengths are."""

    measure: str
    lower_is_better: bool
    by_method: Sequence[Mapping[int, Score]]
    columns: str = "context length, tokens"


def scores_of(result: EvaluationResult) -> Scores:
    """The main numbers of a result.

    Raises:
        TypeError: for a result that has none, as a sweep's.
    """
    match result:
        case PerplexityResult():
            return Scores(
                "perplexity",
                True,
                [{at.length: Score(at.perplexity, at.interval, at.groups) for at in m.lengths} for m in result.methods],
            )
        case LongPerplexityResult():
            return Scores("perplexity of key tokens", True, [_long(m.lengths) for m in result.methods])
        case DepthResult():
            return Scores(
                "share found",
                False,
                [{at.length: Score(at.score, at.interval) for at in m.lengths} for m in result.methods],
            )
        case RulerResult():
            return Scores(
                "RULER score",
                False,
                [{at.length: Score(at.score, at.interval) for at in m.lengths} for m in result.methods],
            )
        case ProbeResult():
            copying = [{at.distance: Score(at.accuracy, at.interval) for at in m.copying} for m in result.methods]
            return Scores("copying accuracy", False, copying, "distance, tokens")
    raise TypeError(f"{type(result).__name__} has no scores")


def _long(lengths: list[LongLengthResult]) -> dict[int, Score]:
    """Without lengths at which no scored token is key."""
    return {
        at.length: Score(at.long_perplexity, at.interval, at.groups) for at in lengths if at.long_perplexity is not None
    }
