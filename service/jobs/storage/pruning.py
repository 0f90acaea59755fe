"""Removal of what is old: outcomes, jobs that have ended, and rows of servers."""

from __future__ import annotations

import time
from datetime import datetime

import structlog
from sqlalchemy import ColumnElement, Text, and_, delete, select, type_coerce
from sqlalchemy.orm import Session

from service.jobs.database.opening import Database
from service.jobs.database.statements import changed
from service.jobs.database.tables import FinishedUnit, Job, StoredOutcome
from service.jobs.records import UNFINISHED
from service.jobs.storage import outcomes
from service.jobs.storage.servers import remove_lapsed
from service.jobs.storage.units import now

DAY_S = 86_400.0

JUMP_S = 3600.0
"""Seconds by which the wall clock may gain on the monotonic one between two looks."""

PUT_OFF_S = DAY_S
"""Seconds for which jobs stay after the wall clock has gained more: time to set it right."""

SHARES_NOTHING = type_coerce(Job.request, Text).contains('"reuse":false')
"""True for a job whose outcomes are its own. Inside a text, JSON escapes the quotes: only the field reads like this."""

log = structlog.get_logger()


class Pruning:
    """Prunes one database, again and again."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._looked: tuple[datetime, float] | None = None
        self._put_off_until = 0.0

    def prune(self, most_bytes: int, kept_days: float | None) -> tuple[int, int]:
        """Remove old outcomes above ``most_bytes``, and jobs that ended more than ``kept_days`` ago; returns how many
        of both."""
        with self._database.writing() as session:
            jobs = 0
            if kept_days is not None and self._clock_is_steady(session):
                ended = and_(Job.state.not_in(UNFINISHED), Job.finished_at < now(session, -kept_days * DAY_S))
                jobs = remove_jobs(session, ended)
            removed = outcomes.prune(session, most_bytes)
            remove_lapsed(session)
        self._database.checkpoint()
        return removed, jobs

    def _clock_is_steady(self, session: Session) -> bool:
        """False for a while after the wall clock has jumped ahead: every job would look old."""
        moment, elapsed = now(session), _elapsed()
        wall: datetime = moment if isinstance(moment, datetime) else session.scalars(select(moment)).one()
        before, self._looked = self._looked, (wall, elapsed)
        if before is not None:
            gained = (wall - before[0]).total_seconds() - (elapsed - before[1])
            if gained > JUMP_S:
                log.warning("jobs_not_pruned", clock_jumped_s=round(gained), put_off_s=PUT_OFF_S)
                self._put_off_until = elapsed + PUT_OFF_S
        return elapsed >= self._put_off_until


def remove_jobs(session: Session, leaving: ColumnElement[bool]) -> int:
    """Remove the jobs ``leaving`` with all that is theirs alone; returns how many."""
    own = select(FinishedUnit.key).join(Job).where(leaving, SHARES_NOTHING)
    session.execute(delete(StoredOutcome).where(StoredOutcome.key.in_(own)))
    return changed(session.execute(delete(Job).where(leaving)))


def _elapsed() -> float:
    """Seconds on a clock that nobody sets. Linux has one that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
