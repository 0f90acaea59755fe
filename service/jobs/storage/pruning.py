"""Removal of what is old: outcomes, jobs that have ended, and rows of servers."""

from __future__ import annotations

from sqlalchemy import and_, delete

from service.jobs.database.opening import Database
from service.jobs.database.tables import Job
from service.jobs.records import UNFINISHED
from service.jobs.storage import outcomes
from service.jobs.storage.outcomes import changed
from service.jobs.storage.servers import remove_lapsed
from service.jobs.storage.units import now

DAY_S = 86_400.0


class Pruning:
    """Prunes one database, again and again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def prune(self, most_bytes: int, kept_days: float | None) -> tuple[int, int]:
        """Remove old outcomes above ``most_bytes``, and jobs that ended more than ``kept_days`` ago; returns how many
        of both."""
        with self._database.writing() as session:
            jobs = 0
            if kept_days is not None:
                ended = and_(Job.state.not_in(UNFINISHED), Job.finished_at < now(session, -kept_days * DAY_S))
                jobs = changed(session.execute(delete(Job).where(ended)))
            removed = outcomes.prune(session, most_bytes)
            remove_lapsed(session)
        self._database.checkpoint()
        return removed, jobs
