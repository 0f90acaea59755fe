"""Partial results of jobs: of those that ended early, and of running ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.results import EvaluationResult, Part, Partial
from service.evaluation.unit import Outcome, Plan
from service.jobs.planning import planned, replayed, request_of, result_of
from service.jobs.storage.measured import Measured
from service.jobs.storage.units import finished_under
from service.models.registry import ModelRegistry, UnknownModel
from service.settings import Settings


def partial_result(
    job: Measured, models: ModelRegistry, settings: Settings, outcome: Callable[[str], Outcome | None]
) -> EvaluationResult | None:
    """The result of the methods whose units are all finished. None without such methods, or where models, limits or
    code have changed since. This version may not take the stored request any more.

    ``outcome`` gives the outcome at an address.
    """
    try:
        request = request_of(job.request)
        whole = planned(request, job.tenant, job.id, models, settings)
        if whole.plan.in_stages:
            whole, _ = replayed(whole, outcome)
        plan, keys, _ = whole
        finished = finished_under(keys, job.finished)
        reduced = plan.reduced(request, finished)
        if reduced is None:
            return None
        part, found = replayed(planned(reduced, job.tenant, job.id, models, settings), outcome)
    except (UnknownModel, InvalidEvaluation):
        return None
    if len(found) < len(part.keys):
        return None
    result = result_of(part.plan, found, job.id, models)
    missing = Counter(unit.subject.label for position, unit in enumerate(plan.units) if position not in finished)
    lacks = lacking(plan, part.plan, finished)
    result.end_early(Partial(units_done=len(finished), units_total=len(keys), missing=dict(missing), lacks=lacks))
    return result


def lacking(whole: Plan, compared: Plan, finished: Collection[int]) -> list[Part]:
    """The parts of ``whole`` that ``compared`` leaves out."""
    subjects = {unit.subject for unit in compared.units}
    unfinished = {unit.subject for position, unit in enumerate(whole.units) if position not in finished}
    if not whole.methods_are_asked:
        return [whole.parts_are]
    found: list[Part] = ["methods"] if unfinished - subjects else []
    return [*found, whole.parts_are] if unfinished & subjects else found
