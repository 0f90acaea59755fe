"""From a checked request to a queued job."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Request
from fastapi.responses import JSONResponse

from service import context
from service.api.encodings.auto import with_methods
from service.api.jobs.lookup import linked, runner_of
from service.api.quotas import TokenRate, log_prompts
from service.api.store import store_of, stored
from service.errors import bad_request
from service.evaluation.catalogue import plan_of
from service.evaluation.request import EvaluationRequest
from service.jobs.address import setup_of, versions_of
from service.jobs.records import JobInfo
from service.jobs.storage.terms import Terms

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
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
    store, runner = store_of(request), runner_of(request)
    tenant = context.current().tenant
    if key is not None and (made := await stored(request, store.submitted, tenant, body, key)):
        return accepted(made, request)
    body = await with_methods(body, request)
    state = request.app.state
    terms = Terms(most_jobs=state.settings.max_jobs, most_bytes=state.settings.max_job_bytes, idempotency_key=key)
    rate = await room_for_a_job(request, terms)
    plan = await state.workers.run(plan_of, body, state.models, state.settings)
    log_prompts(request, body.texts())
    await rate.charge(plan.tokens)
    names = sorted({unit.subject.model for unit in plan.units})
    terms = terms._replace(setup=setup_of(names, versions_of(state.models)))
    size = {"units": plan.cost.units, "tokens": plan.tokens}
    job = await stored(request, store.add, tenant, body, models=names, terms=terms, **size)
    runner.notify()
    return accepted(job, request)


async def room_for_a_job(request: Request, terms: Terms) -> TokenRate:
    """The rate that its tokens are to be charged to.

    Raises:
        ApiError: 429 for too many tokens a minute.
        TooManyJobs, TooManyJobBytes: when the tenant has no room for it now.
    """
    rate: TokenRate = request.app.state.token_rate
    await rate.check()
    await stored(request, store_of(request).check_room, context.current().tenant, terms)
    return rate


def accepted(job: JobInfo, request: Request) -> JSONResponse:
    """202, the job and its address: relative to the request's, so that it holds behind a proxy's path prefix too."""
    info = linked(job, request.app)
    location = "../" * (request.url.path.count("/") - 1) + f"jobs/{info.id}"
    return JSONResponse(info.model_dump(mode="json"), status_code=202, headers={"Location": location})
