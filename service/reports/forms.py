"""The forms of a result, and all that draws them. The fork server imports this once for the processes that render."""

from __future__ import annotations

import gzip
from collections.abc import Callable

from service.evaluation.results import EvaluationResult
from service.evaluation.tables import csv_of, parquet_of
from service.figures import frequencies, raster  # noqa: F401 - the fork server imports what draws
from service.figures.results import html_of, png_of
from service.jobs.records import JobInfo
from service.reports.html import report_of
from service.reports.pages import policy_of
from service.reports.render import Rendered


def _page(html: str) -> Rendered:
    return Rendered(gzip.compress(html.encode(), 6, mtime=0), "text/html", True, policy_of(html))


def _table(result: EvaluationResult, _: JobInfo | None) -> Rendered:
    return Rendered(gzip.compress(csv_of(result).encode(), 6, mtime=0), "text/csv", True)


def _parquet(result: EvaluationResult, _: JobInfo | None) -> Rendered:
    return Rendered(parquet_of(result), "application/vnd.apache.parquet", False)


def _png(result: EvaluationResult, _: JobInfo | None) -> Rendered:
    return Rendered(png_of(result), "image/png", False)


def _html(result: EvaluationResult, _: JobInfo | None) -> Rendered:
    return _page(html_of(result))


def _report(result: EvaluationResult, job: JobInfo | None) -> Rendered:
    return _page(report_of(result, job))


FORMS: dict[str, Callable[[EvaluationResult, JobInfo | None], Rendered]] = {
    "csv": _table,
    "parquet": _parquet,
    "png": _png,
    "html": _html,
    "report": _report,
}
