"""Partial results of jobs that ended early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import undefer

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.results import EvaluationResult, Part, Partial
from service.evaluation.unit import Outcome, Plan
from service.jobs.database.opening import Database
from service.jobs.database.tables import Job
from service.jobs.planning import planned, replayed, request_of, result_of
from service.jobs.records import ENDED_EARLY, JobState
from service.jobs.storage import results
from service.jobs.storage.results import Packed
from service.jobs.storage.store import ID
from service.jobs.storage.units import finished_keys, finished_under
from service.models.registry import ModelRegistry, UnknownModel
from service.settings import Settings


class EndedEarly(NamedTuple):
    """A job that was cancelled or failed at ``finished_at``, or one that runs: ``finished`` are the addresses of its
    finished units by their positions."""

    number: int
    id: str
    tenant: str
    request: dict[str, Any]
    finished: dict[int, str]
    finished_at: datetime | None


def read(database: Database, tenant: str, job_id: str, states: Sequence[JobState] = ENDED_EARLY) -> EndedEarly | None:
    """The job, or None where it is in none of ``states`` or no unit of it is finished."""
    if not ID.fullmatch(job_id):
        return None
    query = select(Job).where(Job.id == job_id, Job.tenant == tenant, Job.state.in_(states))
    with database.reading() as session:
        job = session.scalars(query.options(undefer(Job.request))).one_or_none()
        if job is None:
            return None
        finished = finished_keys(session, job.number)
        if not finished:
            return None
        return EndedEarly(job.number, job.id, tenant, job.request, finished, job.finished_at)


def put(database: Database, job: EndedEarly, packed: Packed) -> None:
    """Store the partial result for later readers, unless the job has gone on meanwhile: it may have ended again."""
    try:
        with database.writing() as session:
            here = select(Job.state, Job.finished_at).where(Job.number == job.number).with_for_update()
            state, finished_at = session.execute(here).one_or_none() or (None, None)
            same_end = state in ENDED_EARLY and finished_at == job.finished_at
            if same_end and not results.is_kept(session, job.number):
                results.put(session, job.id, job.tenant, packed, job.number)
    except IntegrityError:  # another reader was quicker
        return


def partial_result(
    job: EndedEarly, models: ModelRegistry, settings: Settings, outcome: Callable[[str], Outcome | None]
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
