"""``GET /jobs/{id}/events``: a job followed to its end."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from operator import itemgetter
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from service import context
from service.api.files import sends
from service.api.http.access import unauthorized
from service.api.http.routing import Route
from service.api.http.streaming import Emit, event_stream
from service.api.jobs.feed import JobFeed
from service.api.jobs.lookup import job_info, linked, runner_of, stored_job
from service.api.store import STORE_S
from service.errors import bad_request, shutting_down
from service.jobs.records import UNFINISHED, JobInfo, UnitDone
from service.jobs.signals import within

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=Route)

LOOK_AGAIN_S = 2.0
"""Seconds between two looks for events of a job that another process runs."""


@router.get("/{job_id}/events", **sends("text/event-stream"))
async def events(job_id: str, request: Request) -> Any:
    """Server-sent events until the job has ended: ``unit`` for every finished unit, numbered, from the one after
    ``Last-Event-ID``; ``progress`` when tokens were read or the database stalls it; at the end ``job``. A revoked key
    ends them with an error."""
    await stored_job(job_id, request)
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
    runner, traffic, tenant = runner_of(request), request.app.state.traffic, context.current().tenant
    feed: JobFeed = request.app.state.feed
    told: tuple[int, str | None] = -1, None
    was_valid = True
    while True:
        further = runner.next_change()
        is_valid = request.app.state.keys.has(tenant)
        if not (is_valid or was_valid):  # an editor may empty the file of keys before it writes it again
            raise unauthorized()
        was_valid = is_valid
        news = await feed.news(tenant, job_id)
        for number, unit in news.units[bisect_right(news.units, after, key=itemgetter(0)) :]:
            emit(unit, "unit", number)
            after = number
        if news.info.state not in UNFINISHED:
            emit((await job_info(job_id, request)).model_dump_json(), "job")
            return
        if (further_on := (news.info.tokens_done, news.info.stalled)) != told:
            emit(news.info_json, "progress")
            told = further_on
        if traffic.draining:
            raise shutting_down("the job goes on when it is back")
        await within(further, LOOK_AGAIN_S)
        await asyncio.sleep(feed.pause_s)


def feed_of(app: FastAPI) -> JobFeed:
    """News of the jobs in the application's store."""
    state = app.state

    async def info(tenant: str, job_id: str) -> JobInfo:
        found = await state.store_calls.within(STORE_S, state.jobs.get, tenant, job_id, with_request=False)
        return linked(found, app)

    async def units(job_id: str, after: int) -> list[UnitDone]:
        found: list[UnitDone] = await state.store_calls.within(STORE_S, state.jobs.done_units, job_id, after)
        return found

    return JobFeed(info, units)
