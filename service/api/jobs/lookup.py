"""Jobs of the current tenant, as clients see them."""

from __future__ import annotations

from fastapi import FastAPI, Request

from service import context
from service.api.jobs import partial
from service.api.store import store_of, stored
from service.jobs.records import UNFINISHED, JobInfo
from service.jobs.runner import JobRunner

FILES = ("results.json", "results.csv", "results.parquet", "report.html", "plot.png", "plot.svg", "figures.json")
UNITS = ("units.json", "units.csv")
STALLED = "the database of jobs does not answer or takes no writes: jobs wait, and go on when it does"


async def stored_job(job_id: str, request: Request, *, with_request: bool = False) -> JobInfo:
    """The job without links; without its request, which may be megabytes, unless ``with_request``.

    Raises:
        UnknownJob: when the tenant has no such job.
    """
    return await stored(request, store_of(request).get, context.current().tenant, job_id, with_request=with_request)


async def job_info(job_id: str, request: Request) -> JobInfo:
    """The job with its request and its links.

    Raises:
        UnknownJob: when the tenant has no such job.
    """
    return await with_files(await stored_job(job_id, request, with_request=True), request)


async def with_files(info: JobInfo, request: Request) -> JobInfo:
    """``linked`` after a look whether a job that ended early has a partial result: this makes and keeps it."""
    if info.may_have_partial:
        info.has_result = await partial.has_one(info, request)
    return linked(info, request.app)


def linked(info: JobInfo, app: FastAPI) -> JobInfo:
    """``info`` with links to its files, and what it waits for: models that ``app`` does not serve, or the database."""
    if info.state in UNFINISHED and app.state.job_runner.out_of_reach():
        info.stalled = STALLED
    if info.state == "queued":
        served = {model.name for model in app.state.models}
        info.not_served = [name for name in info.models if name not in served]
    names = ["events", *(UNITS if info.units_done else ()), *(FILES if info.has_result else ())]
    info.links = {name: f"/jobs/{info.id}/{name}" for name in names}
    return info


def runner_of(request: Request) -> JobRunner:
    runner: JobRunner = request.app.state.job_runner
    return runner
