"""Jobs: evaluations that outlive their request and the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from fastapi.responses import Response

from service import context
from service.api.encodings.auto import with_methods
from service.api.http.queries import WholeNumber
from service.api.http.routing import DocumentsRoute
from service.api.jobs import comparison, events, files
from service.api.jobs.lookup import job_info, linked, runner_of, stored_job, with_files
from service.api.jobs.submission import NO_ROOM, IdempotencyKey, accepted, charged, check_room, submit
from service.api.quotas import admit, rate_of
from service.api.response_models.jobs import JobList, PlanInfo
from service.api.store import store_of, stored
from service.evaluation.catalogue import EVALUATIONS, any_request, plan_of
from service.evaluation.request import EvaluationRequest
from service.jobs.address import setup_digest, versions_of
from service.jobs.records import ENDED_EARLY, UNFINISHED, JobInfo, JobState
from service.jobs.storage.terms import Terms

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=DocumentsRoute)

if TYPE_CHECKING:
    AnyRequest = EvaluationRequest
else:
    AnyRequest = any_request()

EXAMPLES: Any = {
    name: {"value": {"evaluation": name} | evaluation.request.example()} for name, evaluation in EVALUATIONS.items()
}


@router.post("", status_code=202, response_model=JobInfo)
async def create(
    body: Annotated[AnyRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Queue an evaluation. It runs unit by unit, interleaved with generation; finished units survive the server."""
    return await submit(body, request, idempotency_key)


@router.post("/plan")
async def plan(body: Annotated[AnyRequest, Body(openapi_examples=EXAMPLES)], request: Request) -> PlanInfo:
    """The size of an evaluation, which does not run: everything about the request is checked."""
    state = request.app.state
    body = await with_methods(body, request)
    await admit(request, [])
    planned = await state.workers.run(plan_of, body, state.models, state.settings)
    return PlanInfo(units=planned.cost.units, tokens=planned.tokens)


@router.get("", response_model=JobList)
async def jobs(
    request: Request,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    limit: Annotated[WholeNumber, Query(ge=1, le=1000)] = 100,
    before: Annotated[str | None, Query(description="Only jobs older than this one.")] = None,
) -> JobList:
    """The jobs of this API key. Links of one that ended early name a partial result from the first look at it on."""
    found = await stored(
        request, store_of(request).list, context.current().tenant, state=state, limit=limit, before=before
    )
    return JobList(jobs=[linked(job, request.app) for job in found])


@router.get("/{job_id}", response_model=JobInfo)
async def job(job_id: str, request: Request) -> JobInfo:
    """The state and the progress of a job."""
    return await job_info(job_id, request)


@router.delete("/{job_id}", response_model=JobInfo, responses={204: {"description": "With `forget`: gone."}})
async def delete(
    job_id: str,
    request: Request,
    forget: Annotated[bool, Query(description="Remove the job and its result; only one that has ended.")] = False,
) -> Any:
    """Cancel a job; one that has ended stays as it is. With ``forget`` an ended one is removed."""
    store, tenant = store_of(request), context.current().tenant
    if forget:
        await stored(request, store.remove, tenant, job_id)
        return Response(status_code=204)
    ended = await stored(request, store.cancel, tenant, job_id)
    runner_of(request).notify()
    if ended.finished_at:  # times by the clock of the database
        since_s = (ended.finished_at - (ended.queued_at or ended.created_at)).total_seconds()
        await rate_of(request).give_back(ended.tokens_moved, tenant, since_s)
    return await with_files(ended, request)


@router.post("/{job_id}/resume", status_code=202, response_model=JobInfo)
async def resume(job_id: str, request: Request) -> Any:
    """Resume a job that was cancelled or failed: finished units stay, the rest is queued again. A queued or running
    job stays as it is, a done one is a 409. With a damaged result, it makes that again."""
    info = await stored_job(job_id, request)
    state = request.app.state
    terms = Terms(most_jobs=state.settings.max_jobs, setup=setup_digest(info.models, versions_of(state.models)))
    store, tenant = store_of(request), context.current().tenant
    if info.state in ENDED_EARLY:
        try:
            await check_room(request, terms)
            resumed = await charged(request, info.tokens_total - info.tokens_done, store.resume, tenant, job_id, terms)
        except NO_ROOM:  # another server may have resumed it meanwhile
            resumed = await stored_job(job_id, request, with_request=True)
            if resumed.state not in UNFINISHED:
                raise
    else:
        resumed = await stored(request, store.resume, tenant, job_id, terms)
    runner_of(request).notify()
    return accepted(resumed, request)


ROUTERS = (router, events.router, files.router, comparison.router)
