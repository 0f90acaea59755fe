"""Jobs of the current tenant, as clients see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fastapi import FastAPI, Request

from service import context
from service.jobs.records import ENDED_EARLY, JobInfo
from service.jobs.runner import JobRunner
from service.jobs.storage.calls import StoreCalls
from service.jobs.storage.store import JobStore

STORE_S = 10.0
"""Seconds that an answer waits for the database."""

FILES = ("results.json", "results.csv", "results.parquet", "report.html", "plot.png", "figures.json")
UNITS = ("units.json", "units.csv")

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


async def job_info(job_id: str, request: Request, *, with_request: bool = True) -> JobInfo:
    """The job with its links; without its request, which may be megabytes, unless ``with_request``.

    Raises:
        UnknownJob: when the tenant has no such job.
    """
    tenant = context.current().tenant
    info = await stored(request, store_of(request).get, tenant, job_id, with_request=with_request)
    return linked(info, request.app)


async def stored(
    request: Request, function: Callable[Parameters, Returned], *args: Parameters.args, **options: Parameters.kwargs
) -> Returned:
    """Call the store on one of the database's threads.

    Raises:
        StoreOutOfReach: when the database does not answer; and whatever the store raises.
    """
    calls: StoreCalls = request.app.state.store_calls
    return await calls.within(STORE_S, function, *args, **options)


def linked(info: JobInfo, app: FastAPI) -> JobInfo:
    """``info`` with links to its files, and the models that ``app`` does not serve."""
    if info.state == "queued":
        served = {model.name for model in app.state.models}
        info.not_served = [name for name in info.models if name not in served]
    readable = info.state == "done" or (info.state in ENDED_EARLY and info.units_done)
    names = ["events", *(UNITS if info.units_done else ()), *(FILES if readable else ())]
    info.links = {name: f"/jobs/{info.id}/{name}" for name in names}
    return info


def store_of(request: Request) -> JobStore:
    store: JobStore = request.app.state.jobs
    return store


def runner_of(request: Request) -> JobRunner:
    runner: JobRunner = request.app.state.job_runner
    return runner
