"""Rounds of successive halving at the target length, then the finalists at shorter lengths."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from patches import UNSCALED, Method, alike
from service.evaluation.checks import (
    InvalidEvaluation,
    affordable,
    bos_of,
    documents_by_length,
    lengths_of,
)
from service.evaluation.cost import Cost
from service.evaluation.documents import Document, doubling_lengths
from service.evaluation.recommend.candidates import candidates_of, reads
from service.evaluation.recommend.judging import Collected, Judge
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.recommend.results import RecommendResult
from service.evaluation.recommend.rounds import Schedule
from service.evaluation.recommend.unit import SHORTEST, Layout, RecallUnit
from service.evaluation.results import DocumentInfo, Part
from service.evaluation.scoring.places import Places, places_of
from service.evaluation.unit import Outcome, Plan, Subject, Unit, finished_stages
from service.evaluation.words import measured_text, skipped_text
from service.models.policies import out_of_reach
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

DEFAULT_REACH = 4
"""The target is this many times the trained length by default."""


class Reading(NamedTuple):
    """A subject, by its index, reads the windows begin <= i < stop of ``length`` tokens."""

    subject: int
    length: int
    begin: int
    stop: int


@dataclass(frozen=True, eq=False)
class RecommendPlan(Plan):
    """``subjects`` begin with the checkpoint's own encoding, which may end before the target length, as tables do.
    ``entrants`` are those of the first round, by index. ``proposed``: the candidates are the methods' own.
    ``cautions`` end the words of the answer."""

    in_stages: ClassVar[bool] = True
    parts_are: ClassVar[Part] = "rounds"

    model: str
    fingerprint: str
    trained_length: int
    subjects: tuple[Subject, ...]
    entrants: frozenset[int]
    proposed: bool
    documents: list[Document]
    skipped: list[DocumentInfo]
    lengths: list[int]
    tolerance: float
    system: str | None
    schedule: Schedule
    places: Places
    layout: Layout
    seed: int
    bos: int | None
    chunk: int | None
    stages: tuple[tuple[Reading, ...], ...]
    cautions: tuple[str, ...]

    @property
    def cost(self) -> Cost:
        known = [reading for stage in self.stages for reading in stage]
        passes = sum(reading.stop - reading.begin for reading in known)
        tokens = sum((reading.stop - reading.begin) * reading.length for reading in known)
        return Cost(tokens, passes, passes) + self.schedule.cost_from(len(self.stages))

    @cached_property
    def units(self) -> Sequence[Unit]:
        return [
            self._unit(reading.subject, reading.length, window)
            for stage in self.stages
            for reading in stage
            for window in range(reading.begin, reading.stop)
        ]

    def _unit(self, subject: int, length: int, window: int) -> RecallUnit:
        place = self.places.windows[window]
        document = self.documents[place.document]
        return RecallUnit(
            subject=self.subjects[subject],
            length=length,
            name=f"{document.name} before token {place.stop:,}",
            document=document,
            stop=place.stop,
            layout=self.layout,
            bos=self.bos,
            chunk=self.chunk,
        )

    def extended(self, outcomes: Sequence[Outcome]) -> Plan | None:
        done = len(self.stages)
        if done >= self.schedule.whole:
            return None
        judge = self._judge(outcomes)
        if done < len(self.schedule.entrants):
            begin, stop = self.schedule.read[done - 1], self.schedule.read[done]
            kept = judge.best(self._candidates(self.stages[-1]), self.schedule.entrants[done])
            stage = [Reading(subject, self.schedule.target, begin, stop) for subject in kept]
            return replace(self, stages=(*self.stages, tuple(stage)))
        return self._with_shorter(judge)

    def _candidates(self, stage: Sequence[Reading]) -> list[int]:
        """The subjects that compete in a round: the reference may read as many tokens, and does not."""
        at_target = [reading.subject for reading in stage if reading.length == self.schedule.target]
        return [subject for subject in dict.fromkeys(at_target) if subject in self.entrants]

    def _with_shorter(self, judge: Judge) -> Plan:
        """The finalists at each shorter length, in the form that their methods propose there."""
        subjects, stage = list(self.subjects), []
        known = {subject.method: index for index, subject in enumerate(subjects)}
        for length in self.schedule.shorter:
            for finalist in judge.finalists():
                subject = self.subjects[finalist]
                method = self._at(subject, length)
                if method not in known:
                    known[method] = len(subjects)
                    subjects.append(subject._replace(method=method))
                stage.append(Reading(known[method], length, 0, self.schedule.at_shorter))
        return replace(self, subjects=tuple(subjects), stages=(*self.stages, tuple(dict.fromkeys(stage))))

    def _at(self, subject: Subject, length: int) -> Method:
        if not self.proposed:
            return subject.method
        return alike(subject.method, subject.patch.geometry, self.schedule.target, length)

    def _judge(self, outcomes: Sequence[Outcome]) -> Judge:
        remaining = iter(outcomes)
        found: dict[tuple[int, int], list[Outcome]] = {}
        rounds = [0] * len(self.subjects)
        for stage in self.stages[: len(self.schedule.entrants)]:
            for subject in self._candidates(stage):
                rounds[subject] += 1
        for reading in (reading for stage in self.stages for reading in stage):
            several = found.setdefault((reading.subject, reading.length), [])
            several += [next(remaining) for _ in range(reading.begin, reading.stop)]
        measured = Collected(self.subjects, found, tuple(rounds), self.places)
        return Judge(measured, self.schedule, self.trained_length, self.tolerance, self.system)

    def result(self, outcomes: Sequence[Outcome]) -> RecommendResult:
        judge, target = self._judge(outcomes), self.schedule.target
        answer = judge.answer()
        answer.words += [measured_text([document.info for document in self.documents]), *self.cautions]
        return RecommendResult(
            model=self.model,
            fingerprint=self.fingerprint,
            trained_length=self.trained_length,
            target_length=target,
            reference_length=self.schedule.reference,
            lengths=self.lengths,
            tolerance=self.tolerance,
            windows=self.schedule.windows,
            tail=self.layout.tail,
            segment=self.layout.segment,
            seed=self.seed,
            bos=self.bos is not None,
            tokens_read=sum(unit.tokens for unit in self.units),
            tokens_of_all=self.schedule.candidates * self.schedule.windows * target,
            documents=[document.info for document in self.documents],
            skipped=self.skipped,
            answer=answer,
            methods=judge.methods(),
        )

    def reduced(self, request: Any, finished: Collection[int]) -> Any | None:
        """``request`` with those of its rounds that are finished."""
        sizes = (sum(reading.stop - reading.begin for reading in stage) for stage in self.stages)
        rounds = finished_stages(sizes, finished)
        return request.model_copy(update={"rounds": rounds}) if rounds else None


def plan_of(request: RecommendRequest, models: ModelRegistry, settings: Settings) -> RecommendPlan:
    """The first round. Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    bos = bos_of(request.bos, served)
    special = 0 if bos is None else 1
    documents, skipped = documents_by_length(request, served, special, settings)
    lengths = _lengths(request, served, documents, special, settings)
    target, reference = lengths[-1], min(served.trained_length, lengths[-1])
    layout = Layout.within(reference)
    subjects = candidates_of(request, served, models, settings, reference, target)
    at_target, within = _entrants(request, subjects, target, reference)
    room = target - layout.repeated - special
    places = places_of(documents, room, layout.tail, request.windows, request.seed)
    shorter = tuple(length for length in lengths if served.trained_length < length < target)
    every = Schedule(len(at_target), len(places.windows), target, reference, shorter, request.rounds, len(within))
    schedule = every.within(request.budget)
    plan = RecommendPlan(
        model=served.name,
        fingerprint=served.contents,
        trained_length=served.trained_length,
        subjects=tuple(subjects),
        entrants=frozenset(at_target),
        proposed=not request.names_methods,
        documents=documents,
        skipped=skipped,
        lengths=lengths,
        tolerance=request.tolerance,
        system=request.target,
        schedule=schedule,
        places=places,
        layout=layout,
        seed=request.seed,
        bos=bos,
        chunk=settings.score_chunk,
        stages=(_first_round(schedule, at_target, within),),
        cautions=(
            *out_of_reach(target, served),
            *_fewer(request.windows, every.windows, schedule.windows),
            *skipped_text(documents, skipped),
        ),
    )
    affordable(plan, settings, request.longest_field)
    return plan


def _entrants(
    request: RecommendRequest, subjects: Sequence[Subject], target: int, reference: int
) -> tuple[list[int], list[int]]:
    """The candidates at the target length, then the other subjects at the reference length: its positions are all
    trained. The own encoding is measured there, also if a system cannot express it."""
    at_target = [index for index, subject in enumerate(subjects) if index or reads(subject, target, request.target)]
    if not at_target:
        raise InvalidEvaluation(request.longest_field, f"no encoding of this model reads {target} tokens")
    trained = [index for index, subject in enumerate(subjects) if index == 0 or subject.method == UNSCALED]
    return at_target, [index for index in trained if reference < target or index not in at_target]


def _lengths(
    request: RecommendRequest, served: ServedModel, documents: Sequence[Document], special: int, settings: Settings
) -> list[int]:
    """Ascending; the last one is the target."""
    wanted = request.length_values()
    if request.lengths is None or wanted is None:
        longest = min(len(document.token_ids) for document in documents) + special
        reach = min(DEFAULT_REACH * served.trained_length, longest, served.engine.scores.most)
        target = request.length or max(2, reach)
        wanted = [*doubling_lengths(served.trained_length, target), target]
    elif request.length is not None and wanted[-1] > request.length:
        raise InvalidEvaluation("lengths", f"must be at most length ({request.length}), not {wanted[-1]}")
    elif wanted[0] < SHORTEST:
        raise InvalidEvaluation("lengths", f"must be at least {SHORTEST}, not {wanted[0]}")
    lengths = lengths_of(wanted, served, documents, special, settings, request.longest_field)
    shortest = min(served.trained_length, lengths[-1])
    if shortest < SHORTEST:
        raise InvalidEvaluation(
            request.longest_field, f"must be at least {SHORTEST}, as must the model's trained length"
        )
    return lengths


def _fewer(asked: int, room: int, read: int) -> Iterator[str]:
    """Sentences that say why a recommendation reads fewer windows than it was ``asked`` to."""
    if room < asked:
        yield f"The text has room for {room} of {asked} windows: more text compares encodings better."
    if read < room:
        yield f"The budget allows {read} of {room} windows: a larger one compares encodings better."


def _first_round(schedule: Schedule, at_target: Sequence[int], within: Sequence[int]) -> tuple[Reading, ...]:
    """The subjects ``within`` the trained length, then those ``at_target``."""
    return (
        *(Reading(subject, schedule.reference, 0, schedule.windows) for subject in within),
        *(Reading(subject, schedule.target, 0, schedule.read[0]) for subject in at_target),
    )
