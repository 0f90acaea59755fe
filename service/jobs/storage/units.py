"""Units of jobs as rows: unfinished ones, which processes claim, and finished ones, which clients see."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import DateTime, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.orm import Session, aliased

from service.jobs.database.statements import delete_listed, is_postgresql
from service.jobs.database.tables import FinishedUnit, Job, StoredOutcome, UnfinishedUnit

PLANNED = exists().where(UnfinishedUnit.job == Job.number)
"""True for a job with unfinished units."""


@dataclass(frozen=True)
class Finished:
    """A unit whose outcome is known. ``data`` are the packed bytes of one that was just measured."""

    position: int
    key: str
    label: str
    name: str
    length: int
    tokens: int
    summary: dict[str, float]
    seconds: float = 0.0
    data: bytes | None = None


class ClaimedUnit(NamedTuple):
    """A unit that this process runs; ``stored``: another job has measured it meanwhile."""

    position: int
    stored: bool


def now(session: Session, after_s: float = 0.0) -> Any:
    """The database's time in ``after_s`` seconds, for statements: the clocks of several machines differ."""
    after = timedelta(seconds=after_s)
    if is_postgresql(session):
        return func.clock_timestamp(type_=DateTime(timezone=True)) + after
    return datetime.now(UTC) + after  # SQLite serves one machine


def insert_unfinished(session: Session, job: int, units: Iterable[tuple[int, str, str]]) -> None:
    """Add rows without an owner; ``units`` are (position, key, model)."""
    rows = [
        {"job": job, "position": position, "key": key, "model": model, "tokens_done": 0}
        for position, key, model in units
    ]
    if rows:
        session.execute(insert(UnfinishedUnit), rows)


def claim(session: Session, job: int, model: str, owner: str, most: int, lease_s: float) -> list[ClaimedUnit]:
    """The first units of ``job`` on ``model`` without an owner, ``most`` at most, are ``owner``'s now. Rows that
    another transaction claims are left out, and so is a key that has an owner.

    Raises:
        IntegrityError: when another job has claimed one of the keys in the same moment.
    """
    row, same = UnfinishedUnit, aliased(UnfinishedUnit)
    claimed = exists().where(same.key == row.key, same.owner.is_not(None))
    free = select(row.position, row.key).where(row.job == job, row.model == model, row.owner.is_(None), ~claimed)
    chosen = free.order_by(row.position).limit(most).with_for_update(skip_locked=True, of=row)
    first: dict[str, int] = {}
    for position, key in session.execute(chosen):
        first.setdefault(key, position)
    if not first:
        return []
    mine = and_(row.job == job, row.position.in_(first.values()))
    values = {"owner": owner, "lease_until": now(session, lease_s), "tokens_done": 0}
    session.execute(update(row).where(mine).values(values))
    stored = set(session.scalars(select(StoredOutcome.key).where(StoredOutcome.key.in_(first))))
    return [ClaimedUnit(position, key in stored) for key, position in first.items()]


def renew(session: Session, owner: str, jobs: Collection[int], lease_s: float) -> None:
    """Renew the leases of the units of ``jobs`` that ``owner`` has."""
    mine = and_(UnfinishedUnit.owner == owner, UnfinishedUnit.job.in_(jobs))
    session.execute(update(UnfinishedUnit).where(mine).values(lease_until=now(session, lease_s)))


def note_progress(session: Session, owner: str, progress: Mapping[tuple[int, int], int]) -> None:
    """Write the tokens that units of ``owner`` have done: (job, position) -> tokens."""
    for (job, position), tokens in progress.items():
        row = and_(UnfinishedUnit.job == job, UnfinishedUnit.position == position, UnfinishedUnit.owner == owner)
        session.execute(update(UnfinishedUnit).where(row).values(tokens_done=tokens))


def progress(session: Session, job: int, without: str) -> int:
    """Tokens done of the units of a job at work, except those of the owner ``without``."""
    row = UnfinishedUnit
    done = session.scalar(select(func.sum(row.tokens_done)).where(row.job == job, row.owner != without))
    return int(done or 0)


def free(session: Session, owner: str, job: int | None = None, model: str | None = None) -> None:
    """Give up the units of ``owner``, of one job or model or of all."""
    mine = UnfinishedUnit.owner == owner
    if job is not None:
        mine = and_(mine, UnfinishedUnit.job == job)
    if model is not None:
        mine = and_(mine, UnfinishedUnit.model == model)
    session.execute(update(UnfinishedUnit).where(mine).values(owner=None, lease_until=None, tokens_done=0))


def finish(session: Session, job: int, owner: str, keys: Mapping[int, str]) -> set[int]:
    """Remove the rows of units that ``owner`` has finished, position -> key; returns their positions.

    So are rows that nobody has claimed since their lease ran out, as while the database was out of reach. The job may
    have another plan by now, of which ``owner`` has claimed units too. So keys are compared.
    """
    row = UnfinishedUnit
    open_here = or_(row.owner == owner, row.owner.is_(None))
    found = select(row.position, row.key).where(row.job == job, open_here, row.position.in_(keys))
    same = [position for position, key in session.execute(found) if keys[position] == key]
    return set(session.scalars(delete(row).where(row.job == job, row.position.in_(same)).returning(row.position)))


def has_unfinished_units(session: Session, job: int) -> bool:
    return bool(session.scalar(select(exists().where(UnfinishedUnit.job == job))))


def delete_unfinished(session: Session, job: int) -> None:
    """Remove the rows of a job that ends or is planned again."""
    session.execute(delete(UnfinishedUnit).where(UnfinishedUnit.job == job))


def finished_keys(session: Session, job: int) -> dict[int, str]:
    """Position -> key of the finished units of a job."""
    rows = select(FinishedUnit.position, FinishedUnit.key).where(FinishedUnit.job == job)
    return dict(session.execute(rows).all())


def finished_under(keys: Sequence[str], finished: Mapping[int, str]) -> set[int]:
    """Positions of ``finished`` units that a plan with these ``keys`` has: another model or other code changes keys."""
    return {position for position, key in finished.items() if position < len(keys) and keys[position] == key}


def finished_among(session: Session, job: int, positions: Collection[int]) -> list[int]:
    """Those of ``positions`` whose units are finished."""
    if not positions:
        return []
    row = FinishedUnit
    return list(session.scalars(select(row.position).where(row.job == job, row.position.in_(positions))))


def add_finished(session: Session, job: Job, unit: Finished) -> None:
    """Count and number a finished unit."""
    reused = unit.data is None
    job.last_unit += 1
    job.claims = 0
    row = FinishedUnit(job=job.number, number=job.last_unit, reused=reused)
    for name in ("position", "key", "label", "name", "length", "tokens", "seconds", "summary"):
        setattr(row, name, getattr(unit, name))
    session.add(row)
    job.units_done += 1
    job.tokens_done += unit.tokens
    job.seconds += unit.seconds
    if reused:
        job.units_reused += 1
        job.tokens_reused += unit.tokens


def remove_finished(session: Session, job: Job, positions: Collection[int]) -> None:
    """Make units unfinished again and count anew what is finished."""
    if not positions:
        return
    of_job = FinishedUnit.job == job.number
    delete_listed(session, FinishedUnit.position, sorted(positions), of_job)
    rows = session.execute(select(FinishedUnit.reused, FinishedUnit.tokens, FinishedUnit.seconds).where(of_job)).all()
    job.units_done, job.units_reused = len(rows), sum(reused for reused, _, _ in rows)
    job.tokens_done = sum(tokens for _, tokens, _ in rows)
    job.tokens_reused = sum(tokens for reused, tokens, _ in rows if reused)
    job.seconds = sum(seconds for _, _, seconds in rows)
