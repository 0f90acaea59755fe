"""From the evidence of the candidates to those that go on, and to the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from patches import UNSCALED
from service.evaluation.cost import EncodingCost, cost_of, weight_of
from service.evaluation.recommend.evidence import Difference, Evidence, copies
from service.evaluation.recommend.results import Answer, Avoid, Memory, Range, RecommendMethod, Verdict
from service.evaluation.recommend.rounds import FINALISTS, Schedule
from service.evaluation.recommend.words import reason_against, sentences
from service.evaluation.scoring.places import Places
from service.evaluation.unit import Outcome, Subject
from service.export.targets import carriers, differences
from service.models.memory.cache_size import kept_bytes


class Collected(NamedTuple):
    """Outcomes by (index of the subject, length), in the order of the windows at ``places``; rounds by subject."""

    subjects: Sequence[Subject]
    outcomes: Mapping[tuple[int, int], Sequence[Outcome]]
    rounds: Sequence[int]
    places: Places


class Judge:
    """Compares the candidates at each length.

    Recall counts for a model that surely copies within its trained length. Otherwise a windowed candidate cannot
    be chosen beside others: it forgets, and perplexity alone does not show that.
    """

    def __init__(
        self, measured: Collected, schedule: Schedule, trained_length: int, tolerance: float, system: str | None
    ) -> None:
        self._subjects, self._rounds = measured.subjects, measured.rounds
        self._schedule, self._trained_length, self._tolerance = schedule, trained_length, tolerance
        self._target, self._system = schedule.target, system
        own = Evidence.of(measured.outcomes[0, schedule.reference], measured.places, recall_counts=True)
        self._recall_shown = copies(own)
        self.recall_counts = self._recall_shown == "yes"
        self._evidence: dict[int, dict[int, Evidence]] = {}
        for (subject, length), outcomes in measured.outcomes.items():
            found = Evidence.of(outcomes, measured.places, recall_counts=self.recall_counts)
            self._evidence.setdefault(length, {})[subject] = found

    def best(self, entrants: Iterable[int], most: int) -> list[int]:
        """At most ``most`` of a round's candidates: its own, the best, those that answers name, and more."""
        evidence = self._evidence[self._target]
        ranked = sorted(self._by_loss(entrants), key=lambda subject: evidence[subject].loss_of_round)
        others = [subject for subject in ranked if subject != 0]
        kept = list(dict.fromkeys([*others[:1], *self._named(ranked), *others]))
        return [*([0] if 0 in ranked else []), *kept[: most - 1]]

    def _named(self, ranked: Sequence[int]) -> list[int]:
        """The best of the least cost, and the best that a system can express. The former leaves if it surely is not
        good enough. The last round may have room for one: the cheap one, if a system can express it too."""
        evidence = self._evidence[self._target]
        cheap, exportable = self._cheap(ranked), next(filter(self._carriers, ranked), 0)
        interval = evidence[cheap].above(evidence[ranked[0]]).interval
        if interval is not None and interval.low > self._tolerance:
            cheap = 0
        both = [cheap, exportable] if self._carriers(cheap) else [exportable, cheap]
        return [subject for subject in both if subject != 0]

    def _cheap(self, ranked: Sequence[int]) -> int:
        """The best candidate of the least cost beside the checkpoint's own; that one where there is none."""
        weights = {subject: weight_of(self._cost(subject)) for subject in ranked}
        return next((s for s in ranked if s != 0 and weights[s] == min(weights.values())), 0)

    def finalists(self) -> list[int]:
        """The candidates for shorter lengths: the own encoding, those of the last round, the best cheap one."""
        at_target = self._evidence[self._target]
        last = [subject for subject in self._by_loss(self._last_round) if subject != 0][:FINALISTS]
        cheap = self._cheap(self._by_loss(at_target))
        own = [0] if 0 in at_target else []
        return list(dict.fromkeys([*own, *last, *([cheap] if cheap else [])]))

    def _by_loss(self, subjects: Iterable[int]) -> list[int]:
        evidence = self._evidence[self._target]
        return sorted(filter(self._may_be_chosen, subjects), key=lambda subject: (evidence[subject].loss, subject))

    def _may_be_chosen(self, subject: int) -> bool:
        return self.recall_counts or self._all_windowed or self._window(subject) is None or subject == 0

    @cached_property
    def _all_windowed(self) -> bool:
        """True if every candidate is, but for the own encoding: without them nothing is left to compare."""
        return all(self._window(subject) is not None for subject in self._evidence[self._target] if subject != 0)

    @cached_property
    def _last_round(self) -> list[int]:
        """The candidates that have read the most windows of the target length."""
        evidence = self._evidence[self._target]
        most = max(self._rounds)
        return [subject for subject in evidence if self._rounds[subject] == most]

    @cached_property
    def _best(self) -> int:
        return self._by_loss(self._last_round)[0]

    def _above_best(self, subject: int) -> Difference:
        evidence = self._evidence[self._target]
        return evidence[subject].above(evidence[self._best])

    @cached_property
    def _tied(self) -> list[int]:
        """The best, and the others of the last round that the windows do not separate from it. Their means are within
        the tolerance, since few windows separate nothing, however much worse an encoding is."""
        return [
            subject
            for subject in self._by_loss(self._last_round)
            if subject == self._best or ((above := self._above_best(subject)).is_tie and above.mean <= self._tolerance)
        ]

    @cached_property
    def _chosen(self) -> int:
        """The own encoding if it is tied with the best. Else the best, or the cheapest of those that surely are as good
        within the tolerance."""
        if 0 in self._tied:
            return 0
        evidence, best = self._evidence[self._target], self._best
        sure = [s for s in self._tied if s == best or evidence[s].above(evidence[best]).is_below(self._tolerance)]
        return min(sure, key=lambda subject: weight_of(self._cost(subject)))

    def methods(self) -> list[RecommendMethod]:
        """Every candidate, in the order of the plan."""
        return [self._method(index) for index in range(len(self._subjects))]

    def _method(self, index: int) -> RecommendMethod:
        subject = self._subjects[index]
        lengths = sorted(length for length, found in self._evidence.items() if index in found)
        resolved = subject.patch.resolve(subject.method, lengths[-1])
        ends = subject.patch.sink_window(resolved)
        cached = lengths[-1] if ends is None else min(lengths[-1], sum(ends))
        return RecommendMethod(
            **subject.described(lengths[-1]),
            request=subject.method.as_request(),
            cost=self._cost(index),
            memory=Memory(tokens=cached, bytes=kept_bytes(subject.patch, cached)),
            window=self._window(index),
            rounds=self._rounds[index],
            verdict=self._verdict(index),
            lengths=[
                self._evidence[length][index].at(length, self._evidence[length][self._best_at(length)], self._tolerance)
                for length in lengths
            ],
        )

    def answer(self) -> Answer:
        """The recommended encoding, and the sentences that say so."""
        chosen, evidence = self._chosen, self._evidence[self._target]
        others = [subject for subject in self._by_loss(self._last_round) if subject != chosen]
        next_best = others[0] if others else None
        subject, avoid = self._subjects[chosen], self._avoid()
        avoided = {found.label for found in avoid}
        exportable = {self._subjects[s].label: s for s in (chosen, *others) if self._carriers(s)}
        named = next((label for label in exportable if label not in avoided), None)
        answer = Answer(
            label=subject.label,
            pe=subject.method.as_request(),
            native_is_enough=chosen == 0,
            recall_counts=self.recall_counts,
            recall_shown=self._recall_shown,
            keeps_quality=self._keeps_quality(evidence[chosen]),
            runner_up=None if next_best is None else self._subjects[next_best].label,
            confidence=None if next_best is None else evidence[next_best].above(evidence[chosen]).probability,
            tied=[self._subjects[index].label for index in self._tied if index != chosen],
            runners_up=[self._subjects[index].label for index in others],
            exports_to=self._carriers(chosen),
            exportable=named,
            exportable_to=None if named is None else self._carriers(exportable[named]),
            export_differences=None if named is None else self._differences(exportable[named]),
            target=self._system,
            avoid=avoid,
            ranges=self._ranges(),
            words=[],
        )
        answer.words = sentences(answer, self.methods(), self._schedule, self._trained_length, list(exportable))
        return answer

    def _carriers(self, index: int) -> list[str] | None:
        return carriers(self._subjects[index].method, self._subjects[index].patch, self._target)

    def _differences(self, index: int) -> dict[str, list[str]] | None:
        found = differences(self._subjects[index].method, self._subjects[index].patch, self._target) or {}
        return {name: texts for name, texts in found.items() if texts and self._system in (None, name)}

    def _keeps_quality(self, chosen: Evidence) -> bool | None:
        """True if the loss at the target length is surely that within the trained length, but for the tolerance. A
        declared scaling that costs quality there is no measure."""
        above = chosen.above(self._evidence[self._schedule.reference][self._within])
        if above.interval is None:
            return None
        return True if above.is_below(self._tolerance) else False if above.interval.low > self._tolerance else None

    def _avoid(self) -> list[Avoid]:
        """The own encoding if it fails, windowed candidates, then others much worse than the recommended one.

        An attention window is no reason where all have one. ``tied`` and ``unsure`` ones are not among them, nor is
        the one that a policy uses at the target.
        """
        evidence, chosen = self._evidence[self._target], self._chosen
        used = self._within if self._target <= self._trained_length else self._cheapest(self._target)
        separated = (s for s in evidence if s != used and self._verdict(s) in ("worse", "dropped", "windowed"))
        others = sorted(separated, key=lambda s: (s != 0, self._window(s) is None, s))
        windows = {s: None if self._all_windowed and not self.recall_counts else self._window(s) for s in others}
        reasons = [(s, reason_against(evidence[s], evidence[chosen], windows[s])) for s in others]
        return [Avoid(label=self._subjects[s].label, reason=reason) for s, reason in reasons if reason]

    def _ranges(self) -> list[Range]:
        """One encoding up to the trained length, then the cheapest that is good enough at each length."""
        within = self._subjects[self._within]
        ranges = [Range(up_to=self._trained_length, label=within.label, pe=within.method.as_request())]
        for length in sorted(length for length in self._evidence if length > self._trained_length):
            chosen = self._subjects[self._cheapest(length)]
            if ranges[-1].label == chosen.label:
                ranges[-1].up_to = length
            else:
                ranges.append(Range(up_to=length, label=chosen.label, pe=chosen.method.as_request()))
        return ranges

    @cached_property
    def _within(self) -> int:
        """Subject of a policy within the trained length: the own encoding. A declared scaling that surely costs more
        than the tolerance there gives way to plain RoPE."""
        found = self._evidence[self._schedule.reference]
        plain = next((subject for subject in found if self._subjects[subject].method == UNSCALED), 0)
        above = found[0].above(found[plain])
        return 0 if above.is_tie or above.mean <= self._tolerance else plain

    def _cheapest(self, length: int) -> int:
        """The cheapest candidate at a length that is good enough by all of its interval. Without one it is the best.
        The own encoding stays where it is the answer and the windows do not separate it from the best."""
        found, best = self._evidence[length], self._best_at(length)
        above = {subject: found[subject].above(found[best]) for subject in filter(self._may_be_chosen, found)}
        own = above.get(0)
        keeps = self._chosen == 0 and own is not None and own.is_tie and own.mean <= self._tolerance
        otherwise = self._chosen if keeps or length == self._target else best
        enough = [s for s, difference in above.items() if s == otherwise or difference.is_below(self._tolerance)]
        return min(enough, key=lambda s: (weight_of(self._cost(s)), s != 0, s != self._chosen, above[s].mean))

    def _best_at(self, length: int) -> int:
        """At the target, the best of the last round; elsewhere the least loss."""
        if length == self._target:
            return self._best
        found = self._evidence[length]
        return min(filter(self._may_be_chosen, found), key=lambda subject: found[subject].loss)

    def _verdict(self, index: int) -> Verdict:
        if index == self._chosen:
            return "recommended"
        if not self._may_be_chosen(index):
            return "windowed"
        if index == 0 and not self._rounds[0]:
            return "reference"
        if index not in self._last_round:
            return "dropped"
        if index in self._tied:
            return "tied"
        return "unsure" if self._above_best(index).is_tie else "worse"

    def _longest(self, index: int) -> int:
        return max(length for length, found in self._evidence.items() if index in found)

    def _cost(self, index: int) -> EncodingCost:
        subject = self._subjects[index]
        return cost_of(subject.patch.resolve(subject.method, self._longest(index)))

    def _window(self, index: int) -> int | None:
        subject = self._subjects[index]
        ends = subject.patch.resolve(subject.method, self._longest(index)).recipe.sink_window
        return None if ends is None else sum(ends)
