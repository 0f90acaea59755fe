"""Jobs with their finished units, and the partial results that are made of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import undefer

from service.jobs.database.opening import Database
from service.jobs.database.tables import Job
from service.jobs.records import ENDED_EARLY, JobState
from service.jobs.storage import results
from service.jobs.storage.results import Packed
from service.jobs.storage.store import ID
from service.jobs.storage.units import finished_keys


class Measured(NamedTuple):
    """A job in any state. ``finished`` are the addresses of its finished units by their positions, one at least."""

    number: int
    id: str
    tenant: str
    state: JobState
    request: dict[str, Any]
    finished: dict[int, str]
    finished_at: datetime | None


def read(database: Database, tenant: str, job_id: str) -> Measured | None:
    """The job; None without one, or where no unit of it is finished."""
    if not ID.fullmatch(job_id):
        return None
    query = select(Job).options(undefer(Job.request)).where(Job.id == job_id, Job.tenant == tenant)
    with database.reading() as session:
        job = session.scalars(query).one_or_none()
        finished = {} if job is None else finished_keys(session, job.number)
        if job is None or not finished:
            return None
        return Measured(job.number, job.id, tenant, job.state, job.request, finished, job.finished_at)


def put(database: Database, job: Measured, packed: Packed) -> None:
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
