"""The units and the result of a job, as files."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from service import context
from service.api.files import PictureName, Standalone, json_response, result_file, sends, unpacked_response
from service.api.http.routing import Route
from service.api.jobs import partial, prompts
from service.api.jobs.lookup import job_info, stored_job
from service.api.jobs.prompts import WithPrompts
from service.api.response_models.figures import ResultFigures
from service.api.response_models.jobs import UnitList
from service.api.store import store_of, stored
from service.errors import ApiError
from service.evaluation.catalogue import any_result
from service.jobs.records import JobInfo, UnitDone, units_table
from service.jobs.storage.results import Packed
from service.reports.rendered import PAGE, PageOptions

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=Route)


@router.get("/{job_id}/units.json", response_model=UnitList)
async def units_json(job_id: str, request: Request, include_text: WithPrompts = False) -> Response:
    """The finished units of a job in any state."""
    units = UnitList(units=await _units(job_id, request, include_text))
    size = len(units.units) + sum(len(unit.prompt or "") for unit in units.units)
    return await json_response(units, size, request)


@router.get("/{job_id}/units.csv", **sends("text/csv"))
async def units_csv(job_id: str, request: Request) -> Response:
    """The finished units of a job in any state, as a table."""
    table = await request.app.state.workers.run(units_table, await _units(job_id, request))
    return Response(table, media_type="text/csv")


async def _units(job_id: str, request: Request, include_text: bool = False) -> list[UnitDone]:
    job = await stored_job(job_id, request)
    if include_text:
        prompts.check(job.evaluation)
    units = await stored(request, store_of(request).done_units, job_id)
    return await prompts.in_units(units, job_id, request) if include_text else units


@router.get("/{job_id}/results.json", response_model=any_result())
async def results_json(job_id: str, request: Request, include_text: WithPrompts = False) -> Response:
    """The result, which depends on its inputs alone: times are with the job. A cancelled or failed job has the result
    of its complete methods; ``partial`` lists the missing units."""
    packed = await result_of(job_id, request)
    if include_text:
        prompts.check(packed.evaluation)
        packed = await prompts.in_result(packed, job_id, request)
    return unpacked_response(packed.data, "application/json", request, {})


@router.get("/{job_id}/results.csv", **sends("text/csv"))
async def results_csv(job_id: str, request: Request) -> Response:
    """Every number as a long table."""
    return await _file("csv", job_id, request)


PARQUET = "application/vnd.apache.parquet"


@router.get("/{job_id}/results.parquet", **sends(PARQUET))
async def results_parquet(job_id: str, request: Request) -> Response:
    """The same table for pandas, Polars and DuckDB."""
    return await _file("parquet", job_id, request)


@router.get("/{job_id}/plot.png", **sends("image/png"))
async def plot_png(job_id: str, request: Request, picture: PictureName = None) -> Response:
    """The result's first picture, or the one that is named."""
    return await _file("png", job_id, request, options=PageOptions(picture=picture))


@router.get("/{job_id}/plot.svg", **sends("image/svg+xml"))
async def plot_svg(job_id: str, request: Request, picture: PictureName = None) -> Response:
    """The same as vectors, for papers."""
    return await _file("svg", job_id, request, options=PageOptions(picture=picture))


@router.get("/{job_id}/figures.json", response_model=ResultFigures)
async def figures_json(job_id: str, request: Request) -> Response:
    """The answer in sentences and every picture as a Plotly figure. A running job has those of its complete methods."""
    return await _file("figures", job_id, request, packed=await partial.of_running(job_id, request))


@router.get("/{job_id}/report.html", **sends("text/html"))
async def report_html(
    job_id: str,
    request: Request,
    standalone: Standalone = False,
    include_text: Annotated[
        bool, Query(description="With the texts that were sent, not only their hashes, and the prompts that were made.")
    ] = False,
) -> Response:
    """The request, the result, every picture and the numbers on one page. It says so where prompts are asked for and
    cannot be written again."""
    info = await job_info(job_id, request)
    packed = await result_of(job_id, request)
    if include_text and prompts.writes_prompts(packed.evaluation):
        with suppress(prompts.OtherSetup):
            packed = await prompts.in_result(packed, job_id, request)
    return await _file("report", job_id, request, info, PageOptions(standalone, include_text), packed)


async def _file(
    form: str,
    job_id: str,
    request: Request,
    info: JobInfo | None = None,
    options: PageOptions = PAGE,
    packed: Packed | None = None,
) -> Response:
    return await result_file(form, job_id, packed or await result_of(job_id, request), request, info, options)


async def result_of(job_id: str, request: Request) -> Packed:
    """Raises:
    ApiError: 409 while the job has no result.
    """
    tenant, result = context.current().tenant, store_of(request).result
    found = await stored(request, result, tenant, job_id)
    if found is None:
        info = await stored_job(job_id, request)
        is_new = info.has_result  # it has one since a moment ago
        found = await (stored(request, result, tenant, job_id) if is_new else partial.of_ended(info, request))
    if found is None:
        why = f": {info.error.message}" if info.error else ""
        if info.may_have_partial and not info.error:
            why = ", and has no method that is complete by the code and the weights of this server"
        units = f"; its {info.units_done} finished units are in units.json and units.csv" if info.units_done else ""
        raise ApiError(409, f"the job has no result, it is {info.state}{why}{units}", code=f"job_{info.state}")
    return found
