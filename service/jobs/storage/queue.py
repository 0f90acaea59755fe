"""Jobs for the runner: the next ones, their plans, and their units.

One process at a time plans a job: it sets ``owner`` with a conditional UPDATE. Its lease runs out unless it is
renewed, and ends at once with a process of this machine. A planned job has a row for every unfinished unit. Every
process with the same plan claims some of them. The process that finishes the last one owns the job again, for its
next stage or its result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, undefer

from service.evaluation.cost import Cost
from service.evaluation.unit import Outcome
from service.jobs.database.opening import Database
from service.jobs.database.statements import changed
from service.jobs.database.tables import Job, UnfinishedUnit
from service.jobs.records import JobState
from service.jobs.storage import outcomes, results, units
from service.jobs.storage.abandoned import free_abandoned, give_up_if_stuck, is_gone, release
from service.jobs.storage.claims import Claimed, LeaseLost, Recorded, Taken
from service.jobs.storage.owner import Owner
from service.jobs.storage.results import Packed
from service.jobs.storage.servers import ACCEPTED_S, Seen, Servers, any_job_unfinished
from service.jobs.storage.units import PLANNED, Finished, now


class JobQueue:
    """The jobs that a process may work on. ``served`` are its models with their versions. ``only_own`` leaves out
    what others added. Leases last ``lease_s`` seconds."""

    def __init__(
        self, database: Database, owner: Owner, served: Mapping[str, str], *, only_own: bool, lease_s: float
    ) -> None:
        self._database, self._only_own = database, only_own
        self._owner, self._lease_s = str(owner), lease_s
        self._servers = Servers(self._owner, served, only_own=only_own)
        self._other_plans: dict[int, str] = {}

    def waiting(self, model: str, leased: Collection[int], without: Collection[int] = ()) -> dict[str, int]:
        """Tenant -> number of its oldest job that can be planned, or has a free unit for ``model``. ``leased`` are the
        jobs that this process works on; those of ``without`` are left out."""
        free_abandoned(self._database, self._owner, leased)
        with self._database.reading() as session:
            seen = self._servers.seen(session, model)
            if not seen.models:
                return {}
            row = UnfinishedUnit
            free = exists().where(row.job == Job.number, row.model == model, row.owner.is_(None))
            is_open = and_(Job.state == "running", ~self._left(), free)
            unplanned = and_(Job.number.not_in(leased), self._unplanned(session, seen))
            wanted = and_(Job.models.in_(seen.models), Job.number.not_in(without), or_(is_open, unplanned))
            if self._only_own:
                wanted = and_(wanted, Job.added_by == self._owner)
            oldest = select(Job.tenant, func.min(Job.number)).where(wanted).group_by(Job.tenant)
            return dict(session.execute(oldest).all())

    def _unplanned(self, session: Session, seen: Seen) -> ColumnElement[bool]:
        """True for a job without an owner and a plan that this process shares. It is not left to servers of another
        setup. A job that this process owns and does not hold was given up after an error."""
        owners = session.scalars(select(Job.owner).where(Job.state == "running", Job.owner.is_not(None)).distinct())
        gone = [owner for owner in owners if owner is not None and (owner == self._owner or is_gone(owner))]
        lapsed = Job.lease_until < now(session)
        nobody = and_(~PLANNED, or_(Job.owner.is_(None), lapsed, Job.owner.in_(gone)))
        replaced = and_(PLANNED, self._left(), lapsed)
        free = or_(Job.state == "queued", and_(Job.state == "running", or_(nobody, replaced)))
        return and_(free, or_(seen.ours, ~seen.left))

    def _left(self) -> ColumnElement[bool]:
        """True for a job with a plan that this process has left to others."""
        return tuple_(Job.number, Job.plan).in_(list(self._other_plans.items()))

    def claim(self, number: int) -> Claimed | None:
        """Own a job, to plan it; None when another was quicker or it has ended, also now: after ``MOST_CLAIMS``
        without a finished unit it fails."""
        with self._database.writing() as session:
            seen = self._servers.seen(session)
            others = and_(Job.number == number, Job.added_by != self._owner, seen.left)
            others_may = session.scalar(select(Job.number).where(others)) is not None
            taking = update(Job).where(Job.number == number, self._unplanned(session, seen))
            if self._only_own:
                taking = taking.where(Job.added_by == self._owner)
            counted = and_(PLANNED, Job.claims > 0)  # when it was planned before; its units count a death since
            taking = taking.values(
                state="running",
                owner=self._owner,
                lease_until=now(session, self._lease_s),
                plan=None,
                claims=case((counted, Job.claims), else_=Job.claims + 1),
                started_at=func.coalesce(Job.started_at, now(session)),
            )
            if not changed(session.execute(taking)):
                return None
            units.delete_unfinished(session, number)
            self._other_plans.pop(number, None)
            job = session.get_one(Job, number, options=[undefer(Job.request)])
            job.setup = self._servers.setup(job.models)
            if give_up_if_stuck(session, job):
                return None
            return Claimed(number, job.id, job.tenant, job.request, others_may)

    def refuse(self, number: int) -> None:
        """Leave a job that this process cannot plan to others that take it, until none of them lives. Its limits or its
        memory are smaller.

        Raises:
            LeaseLost: when the job is another's by now.
        """
        with self._database.writing() as session:
            job = self._owned(session, number)
            job.state, job.owner, job.claims = "queued", None, max(0, job.claims - 1)
            job.lease_until = now(session, ACCEPTED_S)
            if not job.last_unit:
                job.started_at = None
            self._servers.refused |= {number}

    def begin(self, number: int, keys: Sequence[str], cost: Cost) -> set[int]:
        """Note the plan's cost; returns the positions that are finished already.

        Units finished under an older plan (another model, other code) do not count.

        Raises:
            LeaseLost: when the job is another's by now.
        """
        with self._database.writing() as session:
            job = self._owned(session, number)
            job.units_total, job.tokens_total = cost.units, cost.tokens
            found = units.finished_keys(session, number)
            valid = units.finished_under(keys, found)
            units.remove_finished(session, job, found.keys() - valid)
            return valid

    def enter(self, number: int, plan: str, unfinished: Iterable[tuple[int, str, str]]) -> None:
        """Let every process with the plan of this digest claim units: (position, key, model).

        Raises:
            LeaseLost: when the job is another's by now.
        """
        with self._database.writing() as session:
            job = self._owned(session, number)
            units.insert_unfinished(session, number, unfinished)
            job.plan, job.owner, job.lease_until = plan, None, now(session, self._lease_s)

    def take(self, number: int, model: str, most: int, *, again: bool = False) -> Taken | None:
        """Claim units of a planned job for ``model``, ``most`` at most; None when there are none, and for a plan that
        is another one here. ``again``: after a call without an answer. Units of both that this process has are then
        free: it may not know of them."""
        try:
            with self._database.writing() as session:
                planned = select(Job.plan).where(Job.number == number, Job.state == "running")
                plan = session.scalar(planned.with_for_update(read=True))
                if plan is None or plan == self._other_plans.get(number):
                    return None
                if again:
                    units.free(session, self._owner, number, model)
                found = units.claim(session, number, model, self._owner, most, self._lease_s)
                return Taken(plan, found) if found else None
        except IntegrityError:  # another job has claimed one of the keys in the same moment
            return None

    def joined(self, number: int) -> Claimed | None:
        """A job of which units were taken; None when it has ended."""
        query = select(Job).where(Job.number == number, Job.state == "running").options(undefer(Job.request))
        with self._database.reading() as session:
            job = session.scalars(query).one_or_none()
            return None if job is None else Claimed(number, job.id, job.tenant, job.request)

    def leave(self, number: int, plan: str) -> None:
        """Give back units of a job whose ``plan`` is another one here: other code, hardware or limits. The job is left
        alone until no process works on that plan, or it has a new one."""
        self._other_plans[number] = plan
        self.give_back(number)

    def give_back(self, number: int) -> None:
        """Free the units of a job that this process has claimed."""
        with self._database.writing() as session:
            units.free(session, self._owner, number)

    def outcome(self, key: str) -> Outcome | None:
        """The stored outcome, if there is one and it is whole."""
        return outcomes.read(self._database, key)

    def record(self, number: int, finished: Iterable[Finished]) -> Recorded:
        """Put finished units and their outcomes on disk, all or none. Units that another process has claimed meanwhile
        are not recorded, only their outcomes. Safe to repeat."""
        finished = list(finished)
        with self._database.writing() as session:
            for unit in finished:
                if unit.data is not None:
                    outcomes.put(session, unit.key, unit.data)
            if reused := [unit.key for unit in finished if unit.data is None]:
                outcomes.touch(session, reused)
            job = session.get(Job, number, with_for_update=True)
            if job is None or job.state != "running":
                return Recorded.LOST
            keys = {unit.position: unit.key for unit in finished}
            owns = job.owner == self._owner  # it plans or completes the job, so no rows are claimed
            removed = units.finish(session, number, self._owner, keys)
            new = keys.keys() - units.finished_keys(session, number).keys() if owns else removed
            for unit in finished:
                if unit.position in new:
                    units.add_finished(session, job, unit)
            is_ours = owns or bool(removed)
            if not is_ours or units.has_unfinished_units(session, number):
                return Recorded.LEFT
            job.owner, job.lease_until = self._owner, now(session, self._lease_s)
            return Recorded.LAST

    def outcomes(self, number: int) -> dict[int, Outcome]:
        """Position -> outcome of every finished unit. One that is lost or damaged is unfinished again.

        Raises:
            LeaseLost: when the job is another's by now.
        """
        with self._database.reading() as session:
            keys = units.finished_keys(session, number)
            found = {position: outcomes.get(session, key) for position, key in keys.items()}
        lost = {position for position, outcome in found.items() if outcome is None}
        if lost:
            with self._database.writing() as session:
                units.remove_finished(session, self._owned(session, number), lost)
        return {position: outcome for position, outcome in found.items() if outcome is not None}

    def finish(self, number: int, packed: Packed) -> bool:
        """The job is done and this is its result; false when it is another's by now."""
        with self._database.writing() as session:
            ended = self._end(session, self._mine(number), "done")
            if ended:
                job = session.get_one(Job, number)
                results.put(session, job.id, job.tenant, packed, number)
            return ended

    def fail(self, number: int, code: str, message: str) -> bool:
        """The job cannot be done; false when this process does not work on it by now."""
        at_work = exists().where(UnfinishedUnit.job == Job.number, UnfinishedUnit.owner == self._owner)
        working = and_(Job.number == number, Job.state == "running", or_(Job.owner == self._owner, at_work))
        with self._database.writing() as session:
            ended = self._end(session, working, "failed", error={"code": code, "message": message})
            if ended:
                units.delete_unfinished(session, number)
            return ended

    def _end(self, session: Session, condition: ColumnElement[bool], state: JobState, **values: Any) -> bool:
        values |= {"state": state, "finished_at": now(session), "owner": None, "lease_until": None}
        return changed(session.execute(update(Job).where(condition).values(values))) > 0

    def beat(self, leased: Collection[int], progress: Mapping[tuple[int, int], int] | None = None) -> set[int]:
        """Renew the leases of the jobs ``leased`` and of their units, and write the tokens that units have done: (job,
        position) -> tokens. Returns the jobs that are still to be done."""
        ours = or_(Job.owner.is_(None), Job.owner == self._owner)
        running = select(Job.number).where(Job.number.in_(leased), Job.state == "running").order_by(Job.number)
        with self._database.writing() as session:
            # Jobs before units, as everywhere: PostgreSQL would find a deadlock otherwise.
            still = set(session.scalars(running.with_for_update()))
            lease = update(Job).where(Job.number.in_(still), ours)
            session.execute(lease.values(lease_until=now(session, self._lease_s)))
            units.renew(session, self._owner, still, self._lease_s)
            units.note_progress(session, self._owner, progress or {})
            return still

    def hold(self) -> None:
        """Show servers of another setup that this one lives, while jobs are unfinished."""
        with self._database.reading() as session:
            self._servers.forget_refused(session)
            self._forget_other_plans(session)
            if not any_job_unfinished(session):
                return
        with self._database.writing() as session:
            self._servers.hold(session, self._lease_s)

    def _forget_other_plans(self, session: Session) -> None:
        """Leave out jobs that no longer run."""
        if numbers := list(self._other_plans):
            running = select(Job.number).where(Job.number.in_(numbers), Job.state == "running")
            for number in set(numbers) - set(session.scalars(running)):
                self._other_plans.pop(number, None)

    def release(self, leased: Collection[int] = ()) -> None:
        """Give up everything of this process, in an orderly end: its claims do not count."""
        with self._database.writing() as session:
            release(session, self._owner, leased)
            self._servers.leave(session)

    def _mine(self, number: int) -> ColumnElement[bool]:
        return and_(Job.number == number, Job.owner == self._owner, Job.state == "running")

    def _owned(self, session: Session, number: int) -> Job:
        job = session.scalars(select(Job).where(self._mine(number)).with_for_update()).one_or_none()
        if job is None:
            raise LeaseLost
        return job
