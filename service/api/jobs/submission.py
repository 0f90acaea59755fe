"""From a checked request to a queued job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any
from weakref import WeakValueDictionary

from fastapi import Header, Request
from fastapi.responses import JSONResponse

from service import context
from service.api.encodings.auto import with_methods
from service.api.jobs.lookup import linked, runner_of
from service.api.quotas import Reserved, log_prompts, rate_of
from service.api.store import store_of, stored
from service.errors import ApiError, bad_request
from service.evaluation.catalogue import plan_of
from service.evaluation.request import EvaluationRequest
from service.inputs import matching
from service.jobs.address import setup_digest, versions_of
from service.jobs.records import JobInfo
from service.jobs.storage.refusals import IdempotencyMismatch, JobDone, TooManyJobBytes, TooManyJobs, UnknownJob
from service.jobs.storage.terms import Terms

NO_ROOM = (ApiError, TooManyJobs, TooManyJobBytes)
"""Refusals of a job that another server may have queued, or resumed, meanwhile."""

REFUSALS = (IdempotencyMismatch, JobDone, TooManyJobBytes, TooManyJobs, UnknownJob)
"""Reasons why the store queues no job."""

Submissions = WeakValueDictionary[tuple[str, str], asyncio.Lock]
"""Locks by tenant and idempotency key, while submissions hold them or wait for them."""

PRINTED = r"^[\x21-\x7e]+$"

IdempotencyKey = Annotated[
    Annotated[str, matching(PRINTED, "must have printable characters of ASCII, and no blanks")] | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        json_schema_extra={"pattern": PRINTED},
        description="A name for this submission as a job: sent again with it, no second job is made.",
    ),
]


async def submit(body: EvaluationRequest, request: Request, key: str | None) -> JSONResponse:
    """202 and the job, after everything about the request has been checked.

    Raises:
        ApiError: 400 for an option that a job cannot have, 429 for too many tokens a minute.
        TooManyJobs, TooManyJobBytes: without room for the job, also where others of the tenant took it meanwhile.
        IdempotencyMismatch: for a key that made another job.
        UnknownModel, InvalidEvaluation: from the plan.
    """
    if body.stream or body.timeout_s is not None:
        param = "stream" if body.stream else "timeout_s"
        raise bad_request("a job takes neither stream nor timeout_s: follow its events", param)
    job = await _queued(body, request) if key is None else await _queued_once(body, request, key)
    return accepted(job, request)


async def _queued_once(body: EvaluationRequest, request: Request, key: str) -> JobInfo:
    """The job that ``key`` has made, or makes now."""
    store, tenant = store_of(request), context.current().tenant
    submissions: Submissions = request.app.state.submissions
    async with submissions.setdefault((tenant, key), asyncio.Lock()):
        if made := await stored(request, store.submitted, tenant, body, key):
            return made
        try:
            return await _queued(body, request, key)
        except NO_ROOM:  # another server may have made it meanwhile
            if made := await stored(request, store.submitted, tenant, body, key):
                return made
            raise


async def _queued(body: EvaluationRequest, request: Request, key: str | None = None) -> JobInfo:
    body = await with_methods(body, request)
    state = request.app.state
    terms = Terms(most_jobs=state.settings.max_jobs, most_bytes=state.settings.max_job_bytes, idempotency_key=key)
    await check_room(request, terms)
    plan = await state.workers.run(plan_of, body, state.models, state.settings)
    log_prompts(request, body.texts())
    names = sorted({unit.subject.model for unit in plan.units})
    terms = terms._replace(setup=setup_digest(names, versions_of(state.models)))
    size = {"units": plan.cost.units, "tokens": plan.tokens}
    tenant, add = context.current().tenant, store_of(request).add
    job = await charged(request, plan.tokens, add, tenant, body, models=names, terms=terms, **size)
    runner_of(request).notify()
    return job


async def check_room(request: Request, terms: Terms) -> None:
    """See whether a job would be refused, before it is planned.

    Raises:
        ApiError: 429 for too many tokens a minute.
        TooManyJobs, TooManyJobBytes: when the tenant has no room for it now.
    """
    await rate_of(request).check()
    await stored(request, store_of(request).check_room, context.current().tenant, terms)


async def charged(
    request: Request, tokens: int, call: Callable[..., JobInfo], /, *args: Any, **options: Any
) -> JobInfo:
    """The job that ``call`` of the store queues, for which ``tokens`` are counted. The key gets back those that it did
    not queue. Without an answer of the store they stay counted: the job may be queued.

    Raises:
        ApiError: 429 or 400, from ``TokenRate.charge``; and whatever the store raises.
    """
    reserved = Reserved(request)
    await reserved.charge(tokens, 0)
    try:
        job = await stored(request, call, *args, **options)
        reserved.tokens = tokens - job.tokens_moved
    except REFUSALS:
        reserved.tokens = tokens
        raise
    finally:
        await reserved.settle()
    return job


def accepted(job: JobInfo, request: Request) -> JSONResponse:
    """202, the job and its address: relative to the request's, so that it holds behind a proxy's path prefix too."""
    info = linked(job, request.app)
    location = "../" * (request.url.path.count("/") - 1) + f"jobs/{info.id}"
    return JSONResponse(info.model_dump(mode="json"), status_code=202, headers={"Location": location})
