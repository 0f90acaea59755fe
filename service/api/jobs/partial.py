"""Partial results: of jobs that ended early, made once and kept, and of running ones."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import structlog
from fastapi import Request

from service import context
from service.api.store import store_of, stored
from service.jobs.database.opening import StoreOutOfReach
from service.jobs.partial_results import partial_result
from service.jobs.records import ENDED_EARLY, JobInfo
from service.jobs.storage import measured, outcomes
from service.jobs.storage.measured import Measured
from service.jobs.storage.results import Packed, pack
from service.sharing.admission import QueueFull

REMEMBERED = 10_000
"""Jobs without a partial result that a server remembers: each look plans the job anew."""

log = structlog.get_logger()


class WithoutPartial:
    """Jobs that ended early without a complete method. A resumed job ends at another moment."""

    def __init__(self) -> None:
        self._ends: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, job: JobInfo) -> None:
        self._ends[job.id, str(job.finished_at)] = None
        if len(self._ends) > REMEMBERED:
            self._ends.popitem(last=False)

    def __contains__(self, job: JobInfo) -> bool:
        return (job.id, str(job.finished_at)) in self._ends


async def has_one(job: JobInfo, request: Request) -> bool:
    """True if the files of a partial result can be read. They are refused too while the threads are busy."""
    try:
        return await of_ended(job, request) is not None
    except QueueFull:
        return False


async def of_ended(job: JobInfo, request: Request) -> Packed | None:
    """The partial result of a job that ended early, kept for the next reader; None where it has none.

    Raises:
        QueueFull: from the workers.
    """
    without: WithoutPartial = request.app.state.without_partial
    if not job.may_have_partial or job in without:
        return None
    found = await measured_job(job.id, request)
    packed = await _packed(found, request) if found and found.state in ENDED_EARLY else None
    if found is None or packed is None:
        without.add(job)
        return None
    try:
        await stored(request, measured.put, store_of(request).database, found, packed)
    except StoreOutOfReach as error:
        log.warning("result_not_kept", error=str(error))
    return packed


async def of_running(job_id: str, request: Request) -> Packed | None:
    """The result of the methods of a running job that are complete."""
    job = await measured_job(job_id, request)
    return await _packed(job, request) if job and job.state == "running" else None


async def measured_job(job_id: str, request: Request) -> Measured | None:
    """The tenant's job with its finished units; None without any."""
    return await stored(request, measured.read, store_of(request).database, context.current().tenant, job_id)


async def _packed(job: Measured, request: Request) -> Packed | None:
    """The partial result of a job; None where no method is complete."""
    state = request.app.state
    outcome = partial(outcomes.read, store_of(request).database)
    result = await state.workers.run(partial_result, job, state.models, state.settings, outcome)
    if result is None:
        return None
    packed: Packed = await state.workers.run(pack, result)
    return packed
