"""Jobs: evaluations that outlive the request, and the server, that asked for them."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

from fastapi import APIRouter, Body, FastAPI, Header, Query, Request
from fastapi.responses import JSONResponse, Response

from service import context
from service.api.admission import TokenRate, log_prompts
from service.api.answers import JobList, UnitList
from service.api.feed import JobFeed
from service.api.files import Standalone, json_response, result_file, unpacked_response
from service.api.routing import DocumentsRoute
from service.api.streaming import Emit, event_stream
from service.errors import ApiError, bad_request, shutting_down
from service.evaluation.catalogue import EVALUATIONS, any_request, any_result, plan_of
from service.evaluation.request import EvaluationRequest
from service.jobs import early
from service.jobs.calls import StoreCalls
from service.jobs.records import ENDED_EARLY, UNFINISHED, JobInfo, JobState, UnitDone, units_table
from service.jobs.results import Packed, pack
from service.jobs.runner import JobRunner
from service.jobs.signals import within
from service.jobs.store import JobStore
from service.reports.render import PAGE, PageOptions

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=DocumentsRoute)

if TYPE_CHECKING:
    AnyRequest = EvaluationRequest
else:
    AnyRequest = any_request()

EXAMPLES: Any = {
    name: {"value": {"evaluation": name} | evaluation.request.example()} for name, evaluation in EVALUATIONS.items()
}

LOOK_AGAIN_S = 2.0
"""Events of a job that another process runs are looked for this often."""

STORE_S = 10.0
"""How long an answer waits for the database."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

FILES = ("results.json", "results.csv", "results.parquet", "report.html", "plot.png")
UNITS = ("units.json", "units.csv")


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="A name for this submission: sent again with it, no second job is made.",
    ),
]


async def submit(body: EvaluationRequest, request: Request, key: str | None) -> JSONResponse:
    """202 and the job, after everything about the request has been checked.

    Raises:
        ApiError: 400 for an option that a job cannot have, 429 for too many unfinished jobs or tokens a minute.
        IdempotencyMismatch: for a key that made another job.
        UnknownModel, InvalidEvaluation: from the plan.
    """
    if body.stream or body.timeout_s is not None:
        param = "stream" if body.stream else "timeout_s"
        raise bad_request("a job takes neither stream nor timeout_s: follow its events", param)
    store, runner = _store(request), _runner(request)
    tenant = context.current().tenant
    if key is not None and (made := await _stored(request, store.submitted, tenant, body, key)):
        return _accepted(made, request)
    state = request.app.state
    rate = await _room_for_a_job(request)
    most_bytes = state.settings.max_job_bytes
    if await _stored(request, store.bytes_of, tenant) >= most_bytes:
        message = f"requests of this API key's jobs take up {most_bytes} bytes, the most: forget some that have ended"
        raise ApiError(429, message, code="too_many_job_bytes")
    plan = await state.workers.run(plan_of, body, state.models, state.settings)
    log_prompts(request, body.texts())
    await rate.charge(plan.tokens)
    names = sorted({unit.subject.model for unit in plan.units})
    size = {"units": len(plan.units), "tokens": plan.tokens}
    job = await _stored(request, store.add, tenant, body, models=names, idempotency_key=key, **size)
    runner.notify()
    return _accepted(job, request)


async def _room_for_a_job(request: Request) -> TokenRate:
    """The rate that its tokens are to be charged to.

    Raises:
        ApiError: 429 for too many unfinished jobs of the tenant, or tokens a minute.
    """
    state = request.app.state
    rate: TokenRate = state.token_rate
    await rate.check()
    most = state.settings.max_jobs
    if await _stored(request, _store(request).unfinished, context.current().tenant) >= most:
        raise ApiError(429, f"{most} unfinished jobs of this API key are the most", code="too_many_jobs")
    return rate


def _accepted(job: JobInfo, request: Request) -> JSONResponse:
    info = _linked(job, request)
    return JSONResponse(info.model_dump(mode="json"), status_code=202, headers={"Location": f"/jobs/{info.id}"})


@router.post("", status_code=202, response_model=JobInfo)
async def create(
    body: Annotated[AnyRequest, Body(openapi_examples=EXAMPLES)],
    request: Request,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Queue an evaluation. It is worked on between generation steps, unit by unit; what is finished stays finished
    whatever happens to the server."""
    return await submit(body, request, idempotency_key)


@router.get("", response_model=JobList)
async def jobs(
    request: Request,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[str | None, Query(description="Only jobs older than this one.")] = None,
) -> JobList:
    """The jobs of this API key."""
    found = await _stored(
        request, _store(request).list, context.current().tenant, state=state, limit=limit, before=before
    )
    return JobList(jobs=[_linked(job, request) for job in found])


@router.get("/{job_id}", response_model=JobInfo)
async def job(job_id: str, request: Request) -> JobInfo:
    """How far a job is, and what became of it."""
    return await _job(job_id, request)


@router.delete("/{job_id}", response_model=JobInfo, responses={204: {"description": "With `forget`: gone."}})
async def delete(
    job_id: str,
    request: Request,
    forget: Annotated[bool, Query(description="Remove the job and its result; only one that has ended.")] = False,
) -> Any:
    """Cancel a job; one that has ended stays as it is. With ``forget`` an ended one is removed."""
    store, tenant = _store(request), context.current().tenant
    if forget:
        await _stored(request, store.remove, tenant, job_id)
        return Response(status_code=204)
    ended = await _stored(request, store.cancel, tenant, job_id)
    _runner(request).notify()
    return _linked(ended, request)


@router.post("/{job_id}/resume", status_code=202, response_model=JobInfo)
async def resume(job_id: str, request: Request) -> Any:
    """Go on with a job that was cancelled or failed: finished units are kept, the rest is queued again. One that is
    queued or running stays as it is, one that is done is a 409."""
    info = await _job(job_id, request, with_request=False)
    if info.state in ENDED_EARLY:
        rate = await _room_for_a_job(request)
        await rate.charge(info.tokens_total - info.tokens_done)
    resumed = await _stored(request, _store(request).resume, context.current().tenant, job_id)
    _runner(request).notify()
    return _accepted(resumed, request)


@router.get("/{job_id}/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def events(job_id: str, request: Request) -> Any:
    """Server-sent events until the job has ended: ``unit`` for every finished unit, numbered, from the one after
    ``Last-Event-ID``; ``progress`` when tokens were read; at the end ``job``."""
    await _job(job_id, request, with_request=False)
    last = request.headers.get("last-event-id", "0")
    if not re.fullmatch(r"[0-9]{1,18}", last):
        raise bad_request("Last-Event-ID: the number of a unit event", "Last-Event-ID")
    context.current().allow(None)  # a job may take days

    async def follow(emit: Emit) -> None:
        feed: JobFeed = request.app.state.feed
        with feed.following(context.current().tenant, job_id):
            await _follow(job_id, int(last), request, emit)

    return event_stream(follow)


async def _follow(job_id: str, after: int, request: Request, emit: Emit) -> None:
    runner, traffic, tenant = _runner(request), request.app.state.traffic, context.current().tenant
    feed: JobFeed = request.app.state.feed
    told = -1
    while True:
        further = runner.next_change()
        news = await feed.news(tenant, job_id)
        for number, unit in news.units[bisect_right(news.units, after, key=itemgetter(0)) :]:
            emit(unit, "unit", number)
            after = number
        if news.info.state not in UNFINISHED:
            emit((await _job(job_id, request)).model_dump_json(), "job")
            return
        if news.info.tokens_done != told:
            emit(news.info_json, "progress")
            told = news.info.tokens_done
        if traffic.draining:
            raise shutting_down("the job goes on when it is back")
        await within(further, LOOK_AGAIN_S)
        await asyncio.sleep(feed.pause_s)


def feed_of(app: FastAPI) -> JobFeed:
    """News of the jobs in the application's store."""
    state = app.state

    async def info(tenant: str, job_id: str) -> JobInfo:
        found = await state.store_calls.within(STORE_S, state.jobs.get, tenant, job_id, with_request=False)
        return _with_links(found, app)

    async def units(job_id: str, after: int) -> list[UnitDone]:
        found: list[UnitDone] = await state.store_calls.within(STORE_S, state.jobs.done_units, job_id, after)
        return found

    return JobFeed(info, units)


@router.get("/{job_id}/units.json", response_model=UnitList)
async def units_json(job_id: str, request: Request) -> Response:
    """The finished units of a job in any state."""
    units = UnitList(units=await _units(job_id, request))
    return await json_response(units, len(units.units), request)


@router.get("/{job_id}/units.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
async def units_csv(job_id: str, request: Request) -> Response:
    """The finished units of a job in any state, as a table."""
    table = await request.app.state.workers.run(units_table, await _units(job_id, request))
    return Response(table, media_type="text/csv")


async def _units(job_id: str, request: Request) -> list[UnitDone]:
    await _job(job_id, request, with_request=False)
    return await _stored(request, _store(request).done_units, job_id)


@router.get("/{job_id}/results.json", response_model=any_result())
async def results_json(job_id: str, request: Request) -> Response:
    """The result, which depends on its inputs alone: times are with the job. Of a job that was cancelled or failed,
    the result of the methods that are complete; ``partial`` says what it lacks."""
    return unpacked_response((await _result(job_id, request)).data, "application/json", request, {})


@router.get("/{job_id}/results.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
async def results_csv(job_id: str, request: Request) -> Response:
    """Every number as a long table."""
    return await _file("csv", job_id, request)


PARQUET = "application/vnd.apache.parquet"


@router.get("/{job_id}/results.parquet", response_class=Response, responses={200: {"content": {PARQUET: {}}}})
async def results_parquet(job_id: str, request: Request) -> Response:
    """The same table for pandas, Polars and DuckDB."""
    return await _file("parquet", job_id, request)


@router.get("/{job_id}/plot.png", response_class=Response, responses={200: {"content": {"image/png": {}}}})
async def plot_png(job_id: str, request: Request) -> Response:
    """The result's first picture."""
    return await _file("png", job_id, request)


@router.get("/{job_id}/report.html", response_class=Response, responses={200: {"content": {"text/html": {}}}})
async def report_html(
    job_id: str,
    request: Request,
    standalone: Standalone = False,
    include_text: Annotated[bool, Query(description="With the texts that were sent, not only their hashes.")] = False,
) -> Response:
    """What was asked, what came out, every picture and the numbers on one page."""
    info = await _job(job_id, request)
    return await _file("report", job_id, request, info, PageOptions(standalone, include_text))


async def _file(
    form: str, job_id: str, request: Request, info: JobInfo | None = None, options: PageOptions = PAGE
) -> Response:
    packed = await _result(job_id, request)
    job = info or await _job(job_id, request, with_request=False)
    version = f"{job_id} {job.state} {job.units_done}"  # what is partial may become whole
    return await result_file(form, version, packed, request, info, options)


async def _result(job_id: str, request: Request) -> Packed:
    """Raises:
    ApiError: 409 while the job has no result.
    """
    found = await _stored(request, _store(request).result, context.current().tenant, job_id)
    found = found or await _partial(job_id, request)
    if found is None:
        info = await _job(job_id, request, with_request=False)
        why = f": {info.error.message}" if info.error else ""
        units = f"; its {info.units_done} finished units are in units.json and units.csv" if info.units_done else ""
        raise ApiError(409, f"the job has no result, it is {info.state}{why}{units}", code=f"job_{info.state}")
    return found


async def _partial(job_id: str, request: Request) -> Packed | None:
    """What a job that ended early amounts to, made once and kept; None where it has not, or amounts to nothing."""
    state, database = request.app.state, _store(request).database
    job = await _stored(request, early.read, database, context.current().tenant, job_id)
    if job is None:
        return None
    outcome = partial(early.outcome_of, database)
    result = await state.workers.run(early.partial_result, job, state.models, state.settings, outcome)
    if result is None:
        return None
    packed: Packed = await state.workers.run(pack, result)
    await _stored(request, early.keep, database, job, packed)
    return packed


async def _job(job_id: str, request: Request, *, with_request: bool = True) -> JobInfo:
    tenant = context.current().tenant
    return _linked(await _stored(request, _store(request).get, tenant, job_id, with_request=with_request), request)


async def _stored(
    request: Request, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
) -> Returned:
    """Call the store on a thread of its own.

    Raises:
        StoreOutOfReach: when the database does not answer; and whatever the store raises.
    """
    calls: StoreCalls = request.app.state.store_calls
    return await calls.within(STORE_S, function, *args, **options)


def _linked(info: JobInfo, request: Request) -> JobInfo:
    return _with_links(info, request.app)


def _with_links(info: JobInfo, app: FastAPI) -> JobInfo:
    if info.state == "queued":
        served = {model.name for model in app.state.models}
        info.not_served = [name for name in info.models if name not in served]
    readable = info.state == "done" or (info.state in ENDED_EARLY and info.units_done)
    names = ["events", *(UNITS if info.units_done else ()), *(FILES if readable else ())]
    info.links = {name: f"/jobs/{info.id}/{name}" for name in names}
    return info


def _store(request: Request) -> JobStore:
    store: JobStore = request.app.state.jobs
    return store


def _runner(request: Request) -> JobRunner:
    runner: JobRunner = request.app.state.job_runner
    return runner
