"""Terms on which a server accepts a job, and the room that a tenant has for one."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from service.jobs.database.statements import is_postgresql
from service.jobs.database.tables import Job
from service.jobs.records import UNFINISHED
from service.jobs.storage.refusals import TooManyJobBytes, TooManyJobs


class Terms(NamedTuple):
    """``setup``: servers of another one leave the job alone while one of this setup lives. The job that
    ``idempotency_key`` made before is taken in place of a new one. A tenant may have ``most_jobs`` unfinished ones, and
    requests of ``most_bytes``."""

    setup: str | None = None
    idempotency_key: str | None = None
    most_jobs: int | None = None
    most_bytes: int | None = None

    def check(self, session: Session, tenant: str, without: int | None = None) -> None:
        """Count the jobs of ``tenant`` beside the one with the number ``without``.

        Raises:
            TooManyJobs, TooManyJobBytes: where they leave no room for one more.
        """
        others = select(Job).where(Job.tenant == tenant)
        if without is not None:
            others = others.where(Job.number != without)
        if self.most_jobs is not None:
            unfinished = others.where(Job.state.in_(UNFINISHED)).with_only_columns(func.count())
            if (session.scalar(unfinished) or 0) >= self.most_jobs:
                raise TooManyJobs(self.most_jobs)
        if self.most_bytes is not None:
            taken = others.with_only_columns(func.sum(Job.request_bytes))
            if (session.scalar(taken) or 0) >= self.most_bytes:
                raise TooManyJobBytes(self.most_bytes)


ANY = Terms()
"""Any server may plan the job, and there is room for it."""


def alone(session: Session, tenant: str) -> None:
    """Keep others from adding jobs of ``tenant`` until the transaction ends. SQLite's writers are alone anyway."""
    if is_postgresql(session):
        session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:tenant, 0))"), {"tenant": tenant})
