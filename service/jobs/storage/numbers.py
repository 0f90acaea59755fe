"""Numbers of jobs: none is given twice, also after the newest job was removed."""

from __future__ import annotations

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from service.jobs.database.statements import is_postgresql
from service.jobs.database.tables import Job


def give_number(session: Session, job: Job) -> None:
    """Number a new job. A sequence of PostgreSQL does so by itself.

    SQLite alone would count from the newest job that is left. The highest number so far is in the file's
    ``user_version``, which SQLite leaves to programs and changes with the transaction. A migration to AUTOINCREMENT
    would rebuild the table, and a dropped table deletes all that refers to it.
    """
    if is_postgresql(session):
        return
    given = session.scalar(text("PRAGMA user_version")) or 0
    left = session.scalar(select(func.max(Job.number))) or 0
    job.number = max(given, left) + 1
    session.execute(text(f"PRAGMA user_version = {job.number}"))
