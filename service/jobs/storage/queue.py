"""Jobs for the runner: the next ones, their owners, and their finished units.

A process owns a job after setting ``owner`` with a conditional UPDATE, until the lease runs out or the process is
known to be gone. Every change to a running job checks the owner again, so a former owner cannot harm it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from sqlalchemy import ColumnElement, and_, case, delete, func, or_, select, update
from sqlalchemy.orm import Session, undefer

from service.evaluation.unit import Outcome
from service.jobs.records import UNFINISHED, JobState
from service.jobs.storage import outcomes, results
from service.jobs.storage.database import Database
from service.jobs.storage.outcomes import changed
from service.jobs.storage.owner import Owner
from service.jobs.storage.results import Packed
from service.jobs.storage.tables import FinishedUnit, Job

LEASE_S = 30.0
"""Seconds that a job keeps its owner without renewal. Clocks of several machines may differ by less."""

MOST_CLAIMS = 5
"""Claims of one job in a row that end with the death of the process or an error of the runner, without a finished
unit. A job that crashes its server must not do so for ever. An orderly end of the server does not count."""

NO_PROGRESS = {
    "code": "no_progress",
    "message": f"given up: {MOST_CLAIMS} times a server that ran it was killed or failed before a unit was "
    "finished. The log or the memory limit of the server may explain it; finished units stay in the store for a "
    "smaller request",
}

log = structlog.get_logger()


class LeaseLost(RuntimeError):
    """The job is no longer this process's: it was cancelled, or another took it."""


@dataclass(frozen=True)
class Claimed:
    """A job that is this process's now."""

    number: int
    id: str
    tenant: str
    request: dict[str, Any]


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


class JobQueue:
    """The jobs that a process serving the models ``served`` may work on; ``only_own`` leaves out what others added."""

    def __init__(self, database: Database, owner: Owner, served: Collection[str], *, only_own: bool) -> None:
        self._database, self._served, self._only_own = database, frozenset(served), only_own
        self._owner = str(owner)

    def waiting(self, model: str, held: Collection[int]) -> dict[str, int]:
        """Tenant -> number of its oldest job that needs ``model`` and could be claimed; ``held`` are excluded: this
        process runs them."""
        with self._database.reading() as session:
            needed = select(Job.models).where(Job.state.in_(UNFINISHED)).distinct()
            fitting = [text for text in session.scalars(needed) if self._fits(json.loads(text), model)]
            if not fitting:
                return {}
            free = and_(Job.models.in_(fitting), Job.number.not_in(held), self._free(session))
            oldest = select(Job.tenant, func.min(Job.number)).where(free).group_by(Job.tenant)
            return dict(session.execute(oldest).all())

    def _fits(self, needed: list[str], model: str) -> bool:
        return model in needed and self._served.issuperset(needed)

    def _free(self, session: Session) -> ColumnElement[bool]:
        """True for a job without an owner. A job that this process owns and does not hold was given up after an
        error."""
        owners = session.scalars(select(Job.owner).where(Job.state == "running").distinct())
        gone = [text for text in owners if text is not None and (text == self._owner or Owner.parse(text).is_gone())]
        lapsed = or_(Job.owner.is_(None), Job.lease_until < datetime.now(UTC), Job.owner.in_(gone))
        free = or_(Job.state == "queued", and_(Job.state == "running", lapsed))
        return and_(free, Job.added_by == self._owner) if self._only_own else free

    def claim(self, number: int) -> Claimed | None:
        """Make a job this process's; None when another was quicker or it has ended, also now: after ``MOST_CLAIMS``
        without a finished unit it fails."""
        with self._database.writing() as session:
            now = datetime.now(UTC)
            taking = update(Job).where(Job.number == number, self._free(session))
            taking = taking.values(
                state="running",
                owner=self._owner,
                lease_until=now + timedelta(seconds=LEASE_S),
                claims=Job.claims + 1,
                started_at=func.coalesce(Job.started_at, now),
            )
            if not changed(session.execute(taking)):
                return None
            job = session.get_one(Job, number, options=[undefer(Job.request)])
            if job.claims <= MOST_CLAIMS:
                return Claimed(number, job.id, job.tenant, job.request)
            log.warning("job_failed", job=job.id, **NO_PROGRESS)
            job.state, job.finished_at, job.owner, job.lease_until = "failed", now, None, None
            job.error = dict(NO_PROGRESS)
            return None

    def begin(self, number: int, keys: Sequence[str], tokens: int) -> set[int]:
        """Note the plan's size; returns the positions that are finished already.

        Units finished under an older plan (another model, other code) do not count.

        Raises:
            LeaseLost: when the job is another's by now.
        """
        with self._database.writing() as session:
            job = self._held(session, number)
            job.units_total, job.tokens_total = len(keys), tokens
            rows = select(FinishedUnit.position, FinishedUnit.key).where(FinishedUnit.job == number)
            found = dict(session.execute(rows).all())
            valid = {p for p, key in found.items() if p < len(keys) and keys[p] == key}
            self._forget(session, job, found.keys() - valid)
            return valid

    def outcome(self, key: str) -> Outcome | None:
        """The stored outcome, if there is one and it is whole."""
        with self._database.reading() as session:
            return outcomes.get(session, key)

    def record(self, number: int, units: Iterable[Finished]) -> bool:
        """Put finished units and their outcomes on disk, all or none; false when the job is another's by now. Then
        the outcomes alone are kept. Safe to repeat."""
        units = list(units)
        with self._database.writing() as session:
            for unit in units:
                if unit.data is not None:
                    outcomes.put(session, unit.key, unit.data)
            outcomes.touch(session, [unit.key for unit in units if unit.data is None])
            try:
                job = self._held(session, number)
            except LeaseLost:
                return False
            of_job = FinishedUnit.job == number
            positions = [unit.position for unit in units]
            there = select(FinishedUnit.position).where(of_job, FinishedUnit.position.in_(positions))
            recorded = set(session.scalars(there))
            for unit in units:
                if unit.position not in recorded:
                    self._add(session, job, unit)
            return True

    def _add(self, session: Session, job: Job, unit: Finished) -> None:
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

    def outcomes(self, number: int) -> dict[int, Outcome]:
        """Position -> outcome of every finished unit. One that is lost or damaged is unfinished again.

        Raises:
            LeaseLost: when the job is another's by now.
        """
        with self._database.reading() as session:
            rows = select(FinishedUnit.position, FinishedUnit.key).where(FinishedUnit.job == number)
            found = {position: outcomes.get(session, key) for position, key in session.execute(rows).all()}
        lost = {position for position, outcome in found.items() if outcome is None}
        if lost:
            with self._database.writing() as session:
                self._forget(session, self._held(session, number), lost)
        return {position: outcome for position, outcome in found.items() if outcome is not None}

    def _forget(self, session: Session, job: Job, positions: Collection[int]) -> None:
        """Make units unfinished again and count anew what is finished."""
        if not positions:
            return
        of_job = FinishedUnit.job == job.number
        listed = sorted(positions)
        for start in range(0, len(listed), 500):  # a statement takes some thousands of values at most
            some = FinishedUnit.position.in_(listed[start : start + 500])
            session.execute(delete(FinishedUnit).where(of_job, some))
        rows = session.execute(
            select(FinishedUnit.reused, FinishedUnit.tokens, FinishedUnit.seconds).where(of_job)
        ).all()
        job.units_done, job.units_reused = len(rows), sum(reused for reused, _, _ in rows)
        job.tokens_done = sum(tokens for _, tokens, _ in rows)
        job.tokens_reused = sum(tokens for reused, tokens, _ in rows if reused)
        job.seconds = sum(seconds for _, _, seconds in rows)

    def finish(self, number: int, packed: Packed) -> bool:
        """The job is done and this is its result; false when it is another's by now."""
        with self._database.writing() as session:
            ended = self._end(session, number, "done")
            if ended:
                job = session.get_one(Job, number)
                results.put(session, job.id, job.tenant, packed, number)
            return ended

    def fail(self, number: int, code: str, message: str) -> bool:
        """The job cannot be done; false when it is another's by now."""
        with self._database.writing() as session:
            return self._end(session, number, "failed", error={"code": code, "message": message})

    def _end(self, session: Session, number: int, state: JobState, **values: Any) -> bool:
        ended = {"state": state, "finished_at": datetime.now(UTC), "owner": None, "lease_until": None}
        return changed(session.execute(update(Job).where(self._mine(number)).values(ended | values))) > 0

    def beat(self, held: Collection[int]) -> set[int]:
        """Renew the leases; returns the jobs that are still this process's."""
        mine = and_(Job.number.in_(held), Job.owner == self._owner, Job.state == "running")
        with self._database.writing() as session:
            session.execute(update(Job).where(mine).values(lease_until=datetime.now(UTC) + timedelta(seconds=LEASE_S)))
            return set(session.scalars(select(Job.number).where(mine)))

    def release(self) -> None:
        """Queue the unfinished jobs of this process again. Their claims by it do not count."""
        mine = and_(Job.owner == self._owner, Job.state == "running")
        claims = case((Job.claims > 0, Job.claims - 1), else_=0)
        with self._database.writing() as session:
            session.execute(update(Job).where(mine).values(state="queued", owner=None, lease_until=None, claims=claims))

    def prune(self, most_bytes: int, kept_days: float | None) -> tuple[int, int]:
        """Remove old outcomes above ``most_bytes``, and jobs that ended more than ``kept_days`` ago; returns how many
        of both."""
        with self._database.writing() as session:
            jobs = 0
            if kept_days is not None:
                ended = Job.finished_at < datetime.now(UTC) - timedelta(days=kept_days)
                jobs = changed(session.execute(delete(Job).where(Job.state.not_in(UNFINISHED), ended)))
            return outcomes.prune(session, most_bytes), jobs

    def _mine(self, number: int) -> ColumnElement[bool]:
        return and_(Job.number == number, Job.owner == self._owner, Job.state == "running")

    def _held(self, session: Session, number: int) -> Job:
        job = session.scalars(select(Job).where(self._mine(number)).with_for_update()).one_or_none()
        if job is None:
            raise LeaseLost
        return job
