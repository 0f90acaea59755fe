"""Jobs of the current tenant, as clients see them."""

from __future__ import annotations

from fastapi import FastAPI, Request

from service import context
from service.api.store import store_of, stored
from service.jobs.records import ENDED_EARLY, JobInfo
from service.jobs.runner import JobRunner

FILES = ("results.json", "results.csv", "results.parquet", "report.html", "plot.png", "figures.json")
UNITS = ("units.json", "units.csv")


async def job_info(job_id: str, request: Request, *, with_request: bool = True) -> JobInfo:
    """The job with its links; without its request, which may be megabytes, unless ``with_request``.

    Raises:
        UnknownJob: when the tenant has no such job.
    """
    tenant = context.current().tenant
    info = await stored(request, store_of(request).get, tenant, job_id, with_request=with_request)
    return linked(info, request.app)


def linked(info: JobInfo, app: FastAPI) -> JobInfo:
    """``info`` with links to its files, and the models that ``app`` does not serve."""
    if info.state == "queued":
        served = {model.name for model in app.state.models}
        info.not_served = [name for name in info.models if name not in served]
    readable = info.state == "done" or (info.state in ENDED_EARLY and info.units_done)
    names = ["events", *(UNITS if info.units_done else ()), *(FILES if readable else ())]
    info.links = {name: f"/jobs/{info.id}/{name}" for name in names}
    return info


def runner_of(request: Request) -> JobRunner:
    runner: JobRunner = request.app.state.job_runner
    return runner
