"""From the results of a sweep's parts to an answer: the best method, the adequate ones, and the confidence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean

from service.evaluation.cost import cost_of, weight_of
from service.evaluation.formatting import counted, listed, probability
from service.evaluation.results import EvaluationResult
from service.evaluation.scores import Score, Scores, are_equal
from service.evaluation.statistics.per_token import paired_probability
from service.evaluation.statistics.separation import are_apart, is_by_ratio
from service.evaluation.sweep.results import Answer, Judgement, SweepMethod
from service.evaluation.unit import Subject

OTHER_TOKENS = (
    " Under curve each length scores other tokens, so the limit is biased: the protocol tail scores the same."
)


class Judge:
    """Every method by every part at the target length, against the reference within the trained length."""

    def __init__(
        self,
        subjects: Sequence[Subject],
        results: Sequence[EvaluationResult],
        reference: int,
        within: int,
        target: int,
        tolerance: float,
    ) -> None:
        self._subjects, self._target, self._within, self._tolerance = subjects, target, within, tolerance
        self._scores = [result.scores() for result in results]
        self._same_tokens = [result.scores_the_same() or within == target for result in results]
        self._reference = reference
        judged = [self._judgements(index) for index in range(len(results))]
        self._judgements_of = [list(of_method) for of_method in zip(*judged, strict=True)]
        self._mean_ranks = [fmean(at.rank for at in of_method) for of_method in self._judgements_of]
        self._order = sorted(range(len(subjects)), key=lambda method: (self._mean_ranks[method], method))

    @cached_property
    def methods(self) -> list[SweepMethod]:
        """In the order in which they were asked for."""
        return [self._method(index) for index in range(len(self._subjects))]

    def answer(self) -> Answer:
        """The best, the cheapest adequate, and the sentence that says so."""
        methods = self.methods
        if all(at.value is None for method in methods for at in method.judgements):
            return _nothing(f"At {self._target:,} tokens nothing could be measured.")
        best = self._order[0]
        runner_up, confidence = self._next_to(best)
        adequate = [index for index in self._order if methods[index].adequate]
        cheapest = min(adequate, key=lambda i: (self._may_forget(i), weight_of(methods[i].cost)), default=None)
        chosen = None if cheapest is None else methods[cheapest]
        return Answer(
            best=methods[best].label,
            runner_up=None if runner_up is None else methods[runner_up].label,
            confidence=confidence,
            cheapest_adequate=chosen.label if chosen else None,
            cheapest_is_sure=chosen.sure if chosen else None,
            words=self._words(methods, self._lead(methods, best, runner_up, confidence), chosen),
        )

    def _next_to(self, best: int) -> tuple[int | None, float | None]:
        """The next by mean rank, and the confidence that the ``best`` beats it. Of equal ranks, that of the least
        confidence is the next, so the order of the request does not matter."""
        others = [method for method in self._order if method != best]
        if not others:
            return None, None
        rank = self._mean_ranks[others[0]]
        tied = [(other, self._confidence(best, other)) for other in others if self._mean_ranks[other] == rank]
        return min(tied, key=lambda each: (1.0 if each[1] is None else each[1], self._subjects[each[0]].label))

    def _method(self, index: int) -> SweepMethod:
        subject, judgements = self._subjects[index], self._judgements_of[index]
        deciding = [at for at in judgements if at.adequate is not None]
        adequate = bool(deciding) and all(at.adequate for at in deciding)
        return SweepMethod(
            **subject.described(self._target),
            cost=cost_of(subject.patch.resolve(subject.method, self._target)),
            windowed=self._is_windowed(index),
            judgements=judgements,
            adequate=adequate,
            sure=all(at.sure for at in deciding) if adequate else any(at.sure and not at.adequate for at in deciding),
            rank=1 + sum(rank < self._mean_ranks[index] for rank in self._mean_ranks),
        )

    def _is_windowed(self, index: int) -> bool:
        subject = self._subjects[index]
        return subject.patch.resolve(subject.method, self._target).recipe.sink_window is not None

    def _may_forget(self, index: int) -> bool:
        """True for a windowed method without evidence of its recall; the checkpoint's own encoding needs none."""
        return self._is_windowed(index) and index != self._reference and not self._recall_decides()

    def _recall_decides(self) -> bool:
        """True if an evaluation with a limit measures recall."""
        limits = [at.limit for at in self._judgements_of[0]]
        return any(
            limit is not None and not scores.lower_is_better for limit, scores in zip(limits, self._scores, strict=True)
        )

    def _judgements(self, part: int) -> list[Judgement]:
        """Of one part, one per method."""
        scores, same_tokens = self._scores[part], self._same_tokens[part]
        at_target = [by_length.get(self._target) for by_length in scores.by_method]
        reference = scores.by_method[self._reference].get(self._within)
        factor = 1 + self._tolerance if scores.lower_is_better else max(0.0, 1 - self._tolerance)
        # A reference that finds nothing is no limit.
        limit = None if reference is None or reference.value == 0 else reference.value * factor
        judged = []
        for score in at_target:
            itself = limit is not None and score is reference
            pair = (score, reference) if score and reference and limit is not None else None
            worse = sum(
                1 for other in at_target if other is not None and (score is None or _better(other, score, scores))
            )
            judged.append(
                Judgement(
                    evaluation=part,
                    measure=scores.measure,
                    value=score.value if score else None,
                    interval=score.interval if score else None,
                    reference=reference.value if reference else None,
                    limit=limit,
                    adequate=_within_limit(score.value, limit, scores) if score and limit is not None else None,
                    sure=itself or (pair is not None and are_apart(*pair, factor, same_tokens=same_tokens)),
                    by_ratio=pair is not None and not itself and is_by_ratio(*pair, same_tokens=same_tokens),
                    is_reference=itself,
                    rank=worse + 1,
                )
            )
        return judged

    def _confidence(self, best: int, other: int) -> float | None:
        first = self._scores[0]
        a, b = first.by_method[best].get(self._target), first.by_method[other].get(self._target)
        if a is None or b is None or a.pieces is None or b.pieces is None:
            return None
        found = paired_probability(a.pieces, b.pieces)
        # The pieces of equal methods differ by rounding, of which no probability is true but a half.
        return 0.5 if found is not None and are_equal(a.value, b.value) else found

    def _words(self, methods: Sequence[SweepMethod], lead: str, chosen: SweepMethod | None) -> str:
        """The ``lead``, then who is within the tolerance at the least cost."""
        enough = self._good_enough(_first(methods), chosen)
        return f"At {self._target:,} tokens {lead}{enough}{'' if all(self._same_tokens) else OTHER_TOKENS}"

    def _lead(self, methods: Sequence[SweepMethod], best: int, runner_up: int | None, confidence: float | None) -> str:
        """The best, or that several are, if there are others."""
        if all(at.value == 0 for method in methods for at in method.judgements):
            return "every method fails"
        first = _first(methods)
        if runner_up is None:
            return f"only {methods[0].label} was measured"
        if len(first) > 1:
            return f"{', '.join(first[:-1])} and {first[-1]} are equally good"
        if self._is_ahead(runner_up, best):
            measure = f"{'lower' if self._scores[0].lower_is_better else 'higher'} {self._scores[0].measure}"
            return f"{first[0]} is the best over all evaluations, though {methods[runner_up].label} has the {measure}"
        if confidence is None:
            return f"{first[0]} is best"
        by = f" by {self._scores[0].measure}" if len(self._scores) > 1 else ""
        return f"{first[0]} is best (better than the next{by} with probability {probability(confidence)})"

    def _is_ahead(self, method: int, other: int) -> bool:
        """True if the first evaluation has a better number of ``method``."""
        a, b = (self._scores[0].by_method[index].get(self._target) for index in (method, other))
        return a is not None and b is not None and _better(a, b, self._scores[0])

    def _good_enough(self, first: Sequence[str], chosen: SweepMethod | None) -> str:
        itself = f"the model itself at {self._within:,} tokens"
        if not any(at.limit is not None for of_method in self._judgements_of for at in of_method):
            return f"; nothing was found by {itself}, so there is nothing to compare with."
        tolerance = f"{100 * self._tolerance:.3g}%"
        if chosen is None:
            return self._nothing_is_enough(f"stays within {tolerance} of {itself}")
        who = "" if [chosen.label] == list(first) else f"{chosen.label} is "
        doubt = "" if chosen.sure else ", though that is not sure"
        cheapest = f"the cheapest {self._without(chosen)}that is good enough"
        near = f"it is the reference, {itself}" if chosen.is_reference else f"within {tolerance} of {itself}{doubt}"
        return f", and {who}{cheapest}: {near}.{self._caution()}"

    def _nothing_is_enough(self, stays: str) -> str:
        """By its numbers no method is within the limit. Intervals of some reach it."""
        doubts = {
            method.label: found
            for method in self.methods
            if not method.sure and (found := [at for at in method.judgements if at.adequate is False and at.interval])
        }
        if not doubts:
            return f"; no method {stays}."
        texts = dict.fromkeys(self._texts(at) for found in doubts.values() for at in found)
        do = "does" if len(doubts) == 1 else "do"
        why = f"{listed(list(texts))} cannot exclude that {listed(list(doubts))} {do}"
        return f"; on average no method {stays}, but {why}.{self._caution()}"

    def _texts(self, at: Judgement) -> str:
        """The texts that the interval of a judgement is over."""
        kind = at.interval.kind if at.interval else "samples"
        if kind == "samples":
            return "the prompts"
        score = self._scores[at.evaluation].by_method[self._reference].get(self._target)
        pieces = score.pieces if score else None
        return counted(len(pieces), "document") if pieces and kind == "documents" else "one document"

    def _without(self, chosen: SweepMethod) -> str:
        """Words for the windowed methods that are cheaper than the ``chosen`` one, and good enough by perplexity."""
        cheaper = any(
            method.adequate and weight_of(method.cost) < weight_of(chosen.cost) and self._may_forget(index)
            for index, method in enumerate(self.methods)
        )
        return "without a window " if cheaper and not chosen.windowed else ""

    def _caution(self) -> str:
        """Perplexity alone finds windows as good as memory."""
        if self._recall_decides():
            return ""
        measured = any(not scores.lower_is_better for scores in self._scores)
        more = ", and the model itself recalls nothing." if measured else ": add passkey or ruler."
        windowed = [method.label for method in self.methods if method.windowed]
        if windowed:
            return f" Perplexity does not show that {' and '.join(windowed)} cannot recall{more}"
        return f" Perplexity alone says little about recall{more}"


def _nothing(words: str) -> Answer:
    return Answer(
        best=None, runner_up=None, confidence=None, cheapest_adequate=None, cheapest_is_sure=None, words=words
    )


def _first(methods: Sequence[SweepMethod]) -> list[str]:
    """The labels of the best, if there are others."""
    return [method.label for method in methods if method.rank == 1] if len(methods) > 1 else []


def _better(a: Score, b: Score, scores: Scores) -> bool:
    if are_equal(a.value, b.value):
        return False
    return a.value < b.value if scores.lower_is_better else a.value > b.value


def _within_limit(value: float, limit: float, scores: Scores) -> bool:
    return value <= limit if scores.lower_is_better else value >= limit
