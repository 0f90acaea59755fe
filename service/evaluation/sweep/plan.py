"""A sweep: the plans of its parts side by side, and what their results say about every method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from patches import OWN, Method, label_of
from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.checks import InvalidEvaluation, affordable, at_most, subjects_of
from service.evaluation.cost import Cost
from service.evaluation.results import Part
from service.evaluation.retrieval.grid import grid_lengths
from service.evaluation.sweep.judging import Judge
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.sweep.results import SweepResult
from service.evaluation.unit import Outcome, Plan, Subject, Unit, complete_methods
from service.models.registry import ModelRegistry, ServedModel, UnknownModel
from service.settings import Settings


@dataclass(frozen=True, eq=False)
class SweepPlan(Plan):
    """``subjects`` are measured by every part, in this order. ``reference`` is the index of the checkpoint's own
    encoding among them, judged at ``within`` tokens."""

    parts_are: ClassVar[Part] = "evaluations"

    model: str
    trained_length: int
    subjects: list[Subject]
    reference: int
    within: int
    target: int
    tolerance: float
    parts: list[Plan]

    @property
    def cost(self) -> Cost:
        return sum((part.cost for part in self.parts), Cost())

    @cached_property
    def units(self) -> Sequence[Unit]:
        return [unit for part in self.parts for unit in part.units]

    def result(self, outcomes: Sequence[Outcome]) -> SweepResult:
        results, begin = [], 0
        for part in self.parts:
            results.append(part.result(outcomes[begin : begin + len(part.units)]))
            begin += len(part.units)
        judge = Judge(self.subjects, results, self.reference, self.within, self.target, self.tolerance)
        return SweepResult(
            model=self.model,
            trained_length=self.trained_length,
            target_length=self.target,
            tolerance=self.tolerance,
            answer=judge.answer(),
            methods=judge.methods,
            evaluations=results,
        )

    def reduced(self, request: SweepRequest, finished: Collection[int]) -> SweepRequest | None:
        """``request`` with those of its evaluations that are finished. If none is, with the first one and the
        methods that are finished there."""
        whole, begin = [], 0
        for part, evaluation in zip(self.parts, request.evaluations, strict=True):
            stop = begin + len(part.units)
            if all(position in finished for position in range(begin, stop)):
                whole.append(evaluation)
            begin = stop
        if whole:
            return request.model_copy(update={"evaluations": whole})
        complete = complete_methods(self.parts[0].units, finished)
        methods = [subject.method for subject in self.subjects if subject.method in complete]
        kept = {"methods": methods, "factors": None, "evaluations": request.evaluations[:1]}
        return request.model_copy(update=kept) if methods else None


def plan_of(request: SweepRequest, models: ModelRegistry, settings: Settings) -> SweepPlan:
    """The checkpoint's own encoding and a length within its training are measured too, where they were not asked for.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    lengths = _lengths(request, served, settings)
    at_most("methods", request.count(), settings.max_methods)
    target = request.target.length or lengths[-1]
    asked: list[Method] = request.expanded()
    if OWN not in [method.without_follows() for method in asked]:
        asked = [OWN, *asked]
    subjects = _subjects(asked, served, models, settings, lengths[-1], target)
    methods = [subject.method for subject in subjects]
    plan = SweepPlan(
        model=served.name,
        trained_length=served.trained_length,
        subjects=subjects,
        reference=methods.index(OWN),
        within=max(length for length in lengths if length <= min(served.trained_length, target)),
        target=target,
        tolerance=request.target.tolerance,
        parts=[_part(index, request, methods, lengths, models, settings) for index in range(len(request.evaluations))],
    )
    affordable(plan, settings)
    return plan


def _subjects(
    methods: list[Method], served: ServedModel, models: ModelRegistry, settings: Settings, longest: int, target: int
) -> list[Subject]:
    try:
        return subjects_of(methods, served, models, settings, longest=longest, described_at=target)
    except InvalidEvaluation as error:
        name, _, index = error.param.partition(".")
        if not index:
            raise
        # The sweep's methods are not the request's: factors and the reference are among them.
        raise InvalidEvaluation(name, f"{label_of(methods[int(index)])}: {error.message}") from error


def _lengths(request: SweepRequest, served: ServedModel, settings: Settings) -> list[int]:
    """Those of grids, with the target and one within the model's training."""
    trained = served.trained_length
    lengths = set(grid_lengths(request.length_values(), served, settings))
    if request.target.length is not None:
        lengths.add(request.target.length)
    if min(lengths) > trained:
        lengths.add(trained)
    return sorted(lengths)


def _part(
    index: int,
    request: SweepRequest,
    methods: list[Method],
    lengths: list[int],
    models: ModelRegistry,
    settings: Settings,
) -> Plan:
    part = request.evaluations[index]
    whole = part.model_copy(update={"model": request.model, "methods": methods, "lengths": lengths})
    try:
        plan = EVALUATIONS[part.evaluation].plan(whole, models, settings)
    except UnknownModel as error:
        raise UnknownModel(error.name, error.known, f"evaluations.{index}.{error.param}") from error
    except InvalidEvaluation as error:
        own = error.param.partition(".")[0] not in ("lengths", "methods")
        param = f"evaluations.{index}.{error.param}" if own else error.param
        added = set(lengths) - set(request.length_values() or lengths)
        why = "".join(f"; a sweep also measures {length} tokens" for length in sorted(added)) if not own else ""
        raise InvalidEvaluation(param, error.message + why) from error
    return plan
