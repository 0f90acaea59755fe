"""The forms of a result, and all that draws them. The fork server imports this once for the processes that render."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import EvaluationResult
from service.evaluation.tables import parquet_of
from service.figures.drawing import raster  # noqa: F401 - the fork server imports what draws
from service.figures.encodings import overview  # noqa: F401
from service.figures.results import NoSuchPicture, html_of, picture_of, pictures_of
from service.figures.web.page import PLOTLY_FROM_A_PAGE, as_json, scripts
from service.jobs.records import JobInfo
from service.reports.html import report_of
from service.reports.pages import policy
from service.reports.rendered import PageOptions, Rendered, packed_text, refused
from service.reports.table import table


@cache
def policy_of(standalone: bool) -> str:
    """No script runs but those that draw figures.

    A ``standalone`` page has them inside; another one loads Plotly's from the server that it came from.
    """
    return policy(scripts(standalone), scripts_of_server=not standalone)


def _script(options: PageOptions) -> str | None:
    """The address of Plotly's script for a page two levels deep; None for a page that has it inside."""
    return None if options.standalone else PLOTLY_FROM_A_PAGE


def _page(html: str, options: PageOptions) -> Rendered:
    return packed_text(html, "text/html", policy_of(options.standalone))


def _table(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    return table(result)


def _parquet(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    return Rendered(parquet_of(result), "application/vnd.apache.parquet", False)


def _png(result: EvaluationResult, _: JobInfo | None, options: PageOptions) -> Rendered:
    return Rendered(picture_of(result, options.picture).png(), "image/png", False)


def _svg(result: EvaluationResult, _: JobInfo | None, options: PageOptions) -> Rendered:
    drawn = picture_of(result, options.picture).svg().encode()
    return Rendered(drawn, "image/svg+xml", False, policy(()))


def _html(result: EvaluationResult, _: JobInfo | None, options: PageOptions) -> Rendered:
    return _page(html_of(result, _script(options), options.picture), options)


def _report(result: EvaluationResult, job: JobInfo | None, options: PageOptions) -> Rendered:
    return _page(report_of(result, job, include_text=options.include_text, plotly=_script(options)), options)


def _figures(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    partial = result.partial and result.partial.model_dump()
    text = as_json(pictures_of(result), evaluation=result.evaluation, words=result.words(), partial=partial)
    return packed_text(text, "application/json")


def _json(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    return packed_text(result.model_dump_json(), "application/json")


FORMS: dict[str, Callable[[EvaluationResult, JobInfo | None, PageOptions], Rendered]] = {
    "json": _json,
    "csv": _table,
    "parquet": _parquet,
    "png": _png,
    "svg": _svg,
    "html": _html,
    "report": _report,
    "figures": _figures,
}


def form_of(form: str, result: EvaluationResult, job: JobInfo | None, options: PageOptions) -> Rendered:
    """``result`` in a form of ``FORMS``."""
    try:
        return FORMS[form](result, job, options)
    except NoSuchPicture as error:
        return refused("picture", str(error))


for _evaluation in EVALUATIONS.values():  # the fork server imports these once, for all its processes
    _evaluation.result, _evaluation.pictures  # noqa: B018
