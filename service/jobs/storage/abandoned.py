"""Work that processes leave behind, dead or in an orderly end, and the end of jobs that kill every process."""

from __future__ import annotations

from collections.abc import Collection

import structlog
from sqlalchemy import and_, case, exists, func, or_, select, update
from sqlalchemy.orm import Session

from service.jobs.database.opening import Database
from service.jobs.database.statements import changed
from service.jobs.database.tables import Job, UnfinishedUnit
from service.jobs.storage import units
from service.jobs.storage.owner import Owner
from service.jobs.storage.units import now

MOST_CLAIMS = 5
"""Times in a row that a process dies, or its runner fails, in a job without a finished unit. A job that crashes its
servers must not do so for ever. An orderly end of a server does not count."""

NO_PROGRESS = {
    "code": "no_progress",
    "message": f"given up: {MOST_CLAIMS} times a server that ran it was killed or failed before a unit was "
    "finished. The log or the memory limit of the server may explain it. If the job did not cause it, go on with "
    "`ropeway jobs resume` or POST /jobs/ID/resume. Finished units stay in the store, also for a smaller request",
}

log = structlog.get_logger()


def is_gone(owner: str) -> bool:
    """True for the text of an owner that was a process of this machine and has ended."""
    return Owner.parse(owner).is_gone()


def free_abandoned(database: Database, this: str, leased: Collection[int]) -> None:
    """Free the units of owners that are gone or did not renew their leases. The owner ``this`` gave up the units that
    it has in jobs which are not ``leased``."""
    row = UnfinishedUnit
    with database.reading() as session:
        late = func.max(case((row.lease_until < now(session), 1), else_=0))
        claimed = select(row.owner, row.job, late).where(row.owner.is_not(None)).group_by(row.owner, row.job)
        found = [(owner or "", job, bool(any_late)) for owner, job, any_late in session.execute(claimed)]
    gone = {owner for owner in {owner for owner, _, _ in found} if owner != this and is_gone(owner)}

    def given_up(owner: str, job: int) -> bool:
        return owner in gone or (owner == this and job not in leased)

    abandoned = [(job, owner) for owner, job, late in found if given_up(owner, job) or (late and owner != this)]
    if not abandoned:
        return
    with database.writing() as session:
        for number, owner in sorted(abandoned):
            job = session.get(Job, number, with_for_update=True)
            left = and_(row.job == number, row.owner == owner)
            if not given_up(owner, number):
                left = and_(left, row.lease_until < now(session))  # unless it was renewed meanwhile
            values = {"owner": None, "lease_until": None, "tokens_done": 0}
            if changed(session.execute(update(row).where(left).values(values))) and job is not None:
                log.info("units_freed", job=job.id, owner=owner)
                job.claims += 1
                give_up_if_stuck(session, job)


def release(session: Session, owner: str, leased: Collection[int]) -> None:
    """Give up everything of ``owner``, in its orderly end: its claims do not count. Jobs that no other process works
    on wait to be planned again. It works on those of ``leased``."""
    row = UnfinishedUnit
    mine = select(row.job).where(row.owner == owner)
    waits = {"state": "queued", "owner": None, "lease_until": None}
    claims = case((Job.claims > 0, Job.claims - 1), else_=0)
    planning = update(Job).where(Job.owner == owner, Job.state == "running")
    session.execute(planning.values(waits | {"claims": claims}))
    shared = and_(Job.state == "running", or_(Job.number.in_(mine), Job.number.in_(leased)))
    numbers = list(session.scalars(select(Job.number).where(shared).order_by(Job.number).with_for_update()))
    units.free(session, owner)
    for number in numbers:
        at_work = exists().where(row.job == number, row.owner.is_not(None))
        if not session.scalar(select(at_work)):
            units.delete_unfinished(session, number)
            waiting = update(Job).where(Job.number == number, Job.owner.is_(None))
            session.execute(waiting.values(waits | {"claims": claims}))


def give_up_if_stuck(session: Session, job: Job) -> bool:
    """End a job after more than ``MOST_CLAIMS`` claims without a finished unit; true if it ended."""
    if job.claims <= MOST_CLAIMS:
        return False
    log.warning("job_failed", job=job.id, **NO_PROGRESS)
    job.state, job.finished_at, job.owner, job.lease_until = "failed", now(session), None, None
    job.error = dict(NO_PROGRESS)
    units.delete_unfinished(session, job.number)
    return True
