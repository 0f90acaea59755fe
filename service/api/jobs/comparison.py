"""The results of several jobs beside each other, as files."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from service import context
from service.api.files import PictureName, RenderedFiles, Standalone, file_response, sends
from service.api.http.routing import Route
from service.api.jobs.files import result_of
from service.api.response_models.figures import ResultFigures
from service.errors import bad_request
from service.evaluation.comparison.results import ComparisonResult
from service.reports.render import comparison_of
from service.reports.rendered import PAGE, PageOptions, Rendered
from service.sharing.workers import Workers

router = APIRouter(prefix="/comparisons/{jobs}", tags=["jobs"], route_class=Route)

MOST = 8
"""Jobs in one comparison."""
NAME_CHARS = 8
"""Of a job's id, as its name."""

Jobs = Annotated[
    str,
    Path(description=f"Ids of 1 to {MOST} jobs of one evaluation, with commas between. Partners are in the first."),
]
Names = Annotated[
    str | None,
    Query(
        max_length=1000,
        description="A name for each job, with commas between. An empty one is its model, if all models differ, or "
        f"the first {NAME_CHARS} characters of its id. When absent, all are empty.",
    ),
]
Baseline = Annotated[
    str | None,
    Query(
        max_length=1000,
        description="The method that all others are compared with: its name, label or short form. When absent, it is "
        "the method with the same label in the first job. Of a single job, it is `default`, or the first method.",
    ),
]


@router.get("/results.json", response_model=ComparisonResult)
async def results_json(jobs: Jobs, request: Request, names: Names = None, baseline: Baseline = None) -> Response:
    """Every method of the jobs, its partner, and the ratio or the difference with its 95 % interval."""
    return await _file("json", jobs, names, baseline, request)


@router.get("/results.csv", **sends("text/csv"))
async def results_csv(jobs: Jobs, request: Request, names: Names = None, baseline: Baseline = None) -> Response:
    """The same as a long table."""
    return await _file("csv", jobs, names, baseline, request)


@router.get("/plot.png", **sends("image/png"))
async def plot_png(
    jobs: Jobs, request: Request, names: Names = None, baseline: Baseline = None, picture: PictureName = None
) -> Response:
    """The numbers of all jobs as one picture; `change` is the picture of ratios or differences."""
    return await _file("png", jobs, names, baseline, request, PageOptions(picture=picture))


@router.get("/plot.svg", **sends("image/svg+xml"))
async def plot_svg(
    jobs: Jobs, request: Request, names: Names = None, baseline: Baseline = None, picture: PictureName = None
) -> Response:
    """The same as vectors, for papers."""
    return await _file("svg", jobs, names, baseline, request, PageOptions(picture=picture))


@router.get("/figures.json", response_model=ResultFigures)
async def figures_json(jobs: Jobs, request: Request, names: Names = None, baseline: Baseline = None) -> Response:
    """The answer in sentences and both pictures as Plotly figures."""
    return await _file("figures", jobs, names, baseline, request)


@router.get("/report.html", **sends("text/html"))
async def report_html(
    jobs: Jobs, request: Request, names: Names = None, baseline: Baseline = None, standalone: Standalone = False
) -> Response:
    """The answer, both pictures and the numbers on one page."""
    return await _file("report", jobs, names, baseline, request, PageOptions(standalone))


async def _file(
    form: str, jobs: str, names: str | None, baseline: str | None, request: Request, options: PageOptions = PAGE
) -> Response:
    """Raises:
    ApiError: 400 for jobs that are not comparable, 404 for an unknown one, 409 for one without a result.
    """
    ids = jobs.split(",")
    if len(ids) > MOST or not all(ids):
        given = len(list(filter(None, ids)))
        raise bad_request(f"jobs: must be 1 to {MOST} ids with single commas between, and {given} are given", "jobs")
    called = [""] * len(ids) if names is None else [name.strip() for name in names.split(",")]
    if len(called) != len(ids) or not all(name.isprintable() for name in called):
        why = f"must be {len(ids)} printable names with commas between, one for each job; an empty one is its default"
        raise bad_request(f"names: {why}; {len(called)} are given", "names")
    found = [await result_of(job, request) for job in ids]
    places = [job[:NAME_CHARS] for job in ids]
    sources = [(packed.evaluation, packed.data) for packed in found]
    workers: Workers = request.app.state.workers
    files: RenderedFiles = request.app.state.files

    async def make() -> Rendered:
        return await workers.render(comparison_of, form, sources, called, places, baseline, options)

    contents = tuple(packed.data[-8:] for packed in found)
    key = context.current().tenant, jobs, contents, form, names, baseline, options
    return file_response(await files.get(key, make), request)
