"""Jobs as their owners see them: added, listed, cancelled, removed. ``queue`` has the side of the runner."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import case, delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service import context
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.request import EvaluationRequest
from service.jobs.database.opening import CONNECTIONS, Database
from service.jobs.database.tables import FinishedUnit, Job, StoredResult, written
from service.jobs.planning import body_of, is_repeat, request_of
from service.jobs.records import ENDED_EARLY, UNFINISHED, AtWork, JobInfo, JobState, UnitDone
from service.jobs.storage import policies, results, units
from service.jobs.storage.listed import LISTED_REQUEST, listed
from service.jobs.storage.numbers import give_number
from service.jobs.storage.owner import Owner
from service.jobs.storage.pruning import remove_jobs
from service.jobs.storage.refusals import IdempotencyMismatch, JobDone, JobUnfinished, UnknownCursor, UnknownJob
from service.jobs.storage.results import Packed
from service.jobs.storage.servers import ACCEPTED_S
from service.jobs.storage.terms import ANY, Terms, alone
from service.jobs.storage.units import now
from service.policy.policy import Policy

ID = re.compile(r"[0-9a-f]{32}")

SHOWN = (
    *("id", "evaluation", "model", "state", "created_at", "queued_at", "started_at", "finished_at", "error"),
    *("units_total", "units_done", "units_reused", "tokens_total", "tokens_reused"),
)
"""Columns that ``JobInfo`` has as they are."""


class JobStore:
    """Jobs of every tenant in one database. Every call is synchronous and one transaction.

    ``in_flight`` has the units at work in this process: job id -> position -> unit. Its values are replaced, never
    changed.
    """

    def __init__(self, url: str, connections: int = CONNECTIONS) -> None:
        """Raises:
        StoreUnusable: when the database cannot be used.
        """
        self.database = Database(url, connections)
        self.owner = Owner.this()
        self.in_flight: dict[str, dict[int, AtWork]] = {}

    def add(
        self,
        tenant: str,
        request: EvaluationRequest,
        *,
        models: list[str],
        units: int,
        tokens: int,
        terms: Terms = ANY,
    ) -> JobInfo:
        """Queue what ``request`` asks for; ``models`` are the served ones that its units run on. The job that the key
        of ``terms`` made before is returned as it is, and moves no tokens.

        Raises:
            IdempotencyMismatch: when that one was another request.
            TooManyJobs, TooManyJobBytes: when the tenant has no room for it.
        """
        job = Job(
            id=context.new_id(),
            tenant=tenant,
            evaluation=request.evaluation,
            model=request.model,
            models=models_text(models),
            state="queued",
            units_total=units,
            tokens_total=tokens,
            added_by=str(self.owner),
            setup=terms.setup,
            idempotency_key=terms.idempotency_key,
            request=(body := body_of(request)),
            request_bytes=len((text := written(body)).encode()),
            listed=listed(body) if len(text) > LISTED_REQUEST else None,
        )
        try:
            with self.database.writing() as session:
                give_number(session, job)
                job.created_at = job.queued_at = now(session)
                job.lease_until = now(session, ACCEPTED_S)
                session.add(job)
                session.flush()
                alone(session, tenant)
                terms.check(session, tenant, without=job.number)
                return self._info(session, job, job.request, moved=tokens)
        except IntegrityError:
            key = terms.idempotency_key
            found = self.submitted(tenant, request, key) if key else None
            if found is None:
                raise
            return found

    def submitted(self, tenant: str, request: EvaluationRequest, idempotency_key: str) -> JobInfo | None:
        """The job that ``tenant`` made with this key, if there is one. ``request`` is as it was sent.

        Raises:
            IdempotencyMismatch: when it was made for another request.
        """
        query = select(Job).where(Job.tenant == tenant, Job.idempotency_key == idempotency_key)
        with self.database.reading() as session:
            job = session.scalars(query).one_or_none()
            if job is None:
                return None
            try:
                repeated = is_repeat(request, request_of(job.request))
            except InvalidEvaluation:  # this version takes ``request``, and not that one
                repeated = False
            if not repeated:
                raise IdempotencyMismatch(idempotency_key)
            return self._info(session, job, job.request)

    def get(self, tenant: str, job_id: str, *, with_request: bool = True) -> JobInfo:
        """A job; ``with_request`` false saves reading what may be megabytes.

        Raises:
            UnknownJob: when ``tenant`` has no such job.
        """
        in_flight = dict(self.in_flight)
        with self.database.reading() as session:
            job = _job(session, tenant, job_id)
            return self._info(session, job, job.request if with_request else {}, in_flight)

    def list(
        self, tenant: str, *, state: JobState | None = None, limit: int = 100, before: str | None = None
    ) -> list[JobInfo]:
        """Newest first, those older than the job ``before``.

        Raises:
            UnknownCursor: when there is no job ``before``.
        """
        columns = Job.__table__.c
        short = case((func.length(columns.request) <= LISTED_REQUEST, columns.request), else_=columns.listed)
        query = select(Job, short).where(Job.tenant == tenant).order_by(Job.number.desc()).limit(limit)
        if state is not None:
            query = query.where(Job.state == state)
        in_flight = dict(self.in_flight)
        with self.database.reading() as session:
            if before is not None:
                query = query.where(Job.number < _job(session, tenant, before, missing=UnknownCursor).number)
            return [self._info(session, job, asked or {}, in_flight) for job, asked in session.execute(query)]

    def unfinished(self, tenants: Collection[str] | None = None) -> int:
        """Jobs that are queued or running, of ``tenants`` or of all."""
        query = select(Job.tenant, func.count()).where(Job.state.in_(UNFINISHED)).group_by(Job.tenant)
        with self.database.reading() as session:
            return sum(jobs for tenant, jobs in session.execute(query) if tenants is None or tenant in tenants)

    def cancel(self, tenant: str, job_id: str) -> JobInfo:
        """End an unfinished job; outcomes of finished units stay. One that has ended stays as it is, and moves no
        tokens.

        Raises:
            UnknownJob: when ``tenant`` has no such job.
        """
        with self.database.writing() as session:
            job, moved = _job(session, tenant, job_id, for_update=True), 0
            if job.state in UNFINISHED:
                before = self._info(session, job, {})
                moved = before.tokens_total - before.tokens_done  # those of units at work were read
                job.state, job.finished_at, job.owner, job.lease_until = "cancelled", now(session), None, None
                units.delete_unfinished(session, job.number)
            return self._info(session, job, job.request, moved=moved)

    def check_room(self, tenant: str, terms: Terms) -> None:
        """See whether a job of ``tenant`` would be refused, before it is planned.

        Raises:
            TooManyJobs, TooManyJobBytes: when the tenant has no room for it.
        """
        with self.database.reading() as session:
            terms.check(session, tenant)

    def resume(self, tenant: str, job_id: str, terms: Terms = ANY) -> JobInfo:
        """Queue a cancelled or failed job again, or one whose result is damaged: what is finished of it stays
        finished. One that has not ended stays as it is, and moves no tokens.

        Raises:
            UnknownJob: when ``tenant`` has no such job; JobDone when nothing is left of it to do.
            TooManyJobs: when the tenant has no room for it.
        """
        with self.database.writing() as session:
            alone(session, tenant)
            job, moved = _job(session, tenant, job_id, for_update=True), 0
            if job.state == "done" and results.is_whole(session, tenant, job.id):
                raise JobDone(job_id)
            if job.state not in UNFINISHED:
                terms.check(session, tenant, without=job.number)
                session.execute(delete(StoredResult).where(StoredResult.job == job.number))  # partial or damaged
                job.state, job.finished_at, job.error, job.claims = "queued", None, None, 0
                job.added_by, job.lease_until = str(self.owner), now(session, ACCEPTED_S)
                job.setup, job.queued_at = terms.setup or job.setup, now(session)  # weights or code may have changed
                moved = max(0, job.tokens_total - job.tokens_done)
            return self._info(session, job, job.request, moved=moved)

    def remove(self, tenant: str, job_id: str) -> None:
        """Forget a job that has ended, its result, and outcomes that no other job may use.

        Raises:
            UnknownJob: when ``tenant`` has no such job; JobUnfinished when it has not ended.
        """
        with self.database.writing() as session:
            job = _job(session, tenant, job_id, for_update=True)
            if job.state in UNFINISHED:
                raise JobUnfinished(job_id)
            remove_jobs(session, Job.number == job.number)

    def done_units(self, job_id: str, after: int = 0) -> list[UnitDone]:  # type: ignore[valid-type]
        """Finished units with numbers above ``after``."""
        query = (
            select(FinishedUnit)
            .join(Job)
            .where(Job.id == job_id, FinishedUnit.number > after)
            .order_by(FinishedUnit.number)
        )
        with self.database.reading() as session:
            return [UnitDone.model_validate(unit) for unit in session.scalars(query)]

    def result(self, tenant: str, job_id: str) -> Packed | None:
        """The job's result; None until it is done.

        Raises:
            UnknownJob: when ``tenant`` has no such job; ResultDamaged.
        """
        with self.database.reading() as session:
            job = _job(session, tenant, job_id)
            return results.get(session, tenant, job.id)

    def put_result(self, tenant: str, result_id: str, packed: Packed, *, most: int, most_bytes: int) -> None:
        """Keep the result of a request that was answered at once, among the tenant's most recent ones."""
        with self.database.writing() as session:
            results.put(session, result_id, tenant, packed)
            session.flush()
            results.prune(session, tenant, most, most_bytes)

    def find_result(self, tenant: str, result_id: str) -> Packed | None:
        """A result that ``put_result`` stored, or that of a job; None where the tenant has no such result.

        Raises:
            ResultDamaged: for a damaged one.
        """
        if not ID.fullmatch(result_id):
            return None
        with self.database.reading() as session:
            return results.get(session, tenant, result_id)

    def put_policy(self, tenant: str, policy: Policy) -> None:
        """Make ``policy`` that of ``auto`` for ``tenant`` on its model; ``check_policy`` comes before."""
        with self.database.writing() as session:
            policies.put(session, tenant, policy)

    def policy_of(self, tenant: str, fingerprint: str) -> Policy | None:
        """The policy of ``tenant`` for the model with this hash of contents, None without one.

        Raises:
            InvalidPolicy: when this version cannot read it.
        """
        with self.database.reading() as session:
            return policies.get(session, tenant, fingerprint)

    def drop_policy(self, tenant: str, fingerprint: str) -> bool:
        """Remove that policy; false if there is none."""
        with self.database.writing() as session:
            return policies.drop(session, tenant, fingerprint)

    def close(self) -> None:
        self.database.close()

    def _info(
        self,
        session: Session,
        job: Job,
        request: dict[str, Any],
        in_flight: Mapping[str, Mapping[int, AtWork]] | None = None,
        moved: int = 0,
    ) -> JobInfo:
        """``in_flight`` was taken before the session began. A unit that ends meanwhile then counts once."""
        unfinished = job.state in UNFINISHED
        at_work = (self.in_flight if in_flight is None else in_flight).get(job.id, {}) if unfinished else {}
        ended = units.finished_among(session, job.number, at_work)
        here = [unit for position, unit in at_work.items() if position not in ended]
        tokens = sum(unit.tokens for unit in here)
        measured = job.tokens_done - job.tokens_reused + tokens
        seconds = job.seconds + sum(time.perf_counter() - unit.began for unit in here)
        if job.state == "running":
            tokens += units.progress(session, job.number, without=str(self.owner))
        done = min(job.tokens_done + tokens, job.tokens_total)
        left = seconds / measured * (job.tokens_total - done) if unfinished and measured else None
        values = {name: getattr(job, name) for name in SHOWN}
        values |= {"models": json.loads(job.models), "tokens_done": done, "tokens_moved": moved, "request": request}
        ended_early = job.state in ENDED_EARLY and job.units_done > 0
        values["has_result"] = job.state == "done" or (ended_early and results.is_kept(session, job.number))
        return JobInfo.model_validate(values | {"seconds": seconds, "seconds_left": left})


def models_text(models: Iterable[str]) -> str:
    """The one way in which a set of models is written down."""
    return json.dumps(sorted(set(models)))


def _job(
    session: Session, tenant: str, job_id: str, *, for_update: bool = False, missing: type[LookupError] = UnknownJob
) -> Job:
    if not ID.fullmatch(job_id):  # PostgreSQL fails at NUL characters
        raise missing(job_id)
    query = select(Job).where(Job.id == job_id, Job.tenant == tenant)
    if for_update:
        query = query.with_for_update()  # SQLite's writers are alone anyway
    job = session.scalars(query).one_or_none()
    if job is None:
        raise missing(job_id)
    return job
