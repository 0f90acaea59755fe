"""Files made of results, in a process of its own: parsing and drawing would hold the server's interpreter for seconds.

Everything a file needs is imported here, so a fork server imports it once.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from patches import Recipe
from service.evaluation.answers import RESULTS
from service.evaluation.results import EvaluationResult
from service.evaluation.tables import csv_of, parquet_of
from service.figures import raster  # noqa: F401 - the fork server imports what draws
from service.figures.encodings import encoding_png
from service.figures.results import html_of, png_of
from service.figures.web.page import PLOTLY_FROM_A_PAGE
from service.jobs.records import JobInfo
from service.reports.html import report_of
from service.reports.pages import policy_of


class Rendered(NamedTuple):
    """A file: ``data`` is packed with gzip where that makes it smaller, ``policy`` is a page's."""

    data: bytes
    media_type: str
    packed: bool
    policy: str | None = None


class PageOptions(NamedTuple):
    """Whether a page has Plotly's script inside, and whether a report has the texts that were sent."""

    standalone: bool = False
    include_text: bool = False

    @property
    def plotly(self) -> str | None:
        """The address of Plotly's script for a page two levels deep; None for a page that has it inside."""
        return None if self.standalone else PLOTLY_FROM_A_PAGE


PAGE = PageOptions()
"""A page of the server."""


def _page(html: str, options: PageOptions) -> Rendered:
    return Rendered(gzip.compress(html.encode(), 6, mtime=0), "text/html", True, policy_of(options.standalone))


def _table(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    return Rendered(gzip.compress(csv_of(result).encode(), 6, mtime=0), "text/csv", True)


def _parquet(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    return Rendered(parquet_of(result), "application/vnd.apache.parquet", False)


def _png(result: EvaluationResult, _: JobInfo | None, __: PageOptions) -> Rendered:
    return Rendered(png_of(result), "image/png", False)


def _html(result: EvaluationResult, _: JobInfo | None, options: PageOptions) -> Rendered:
    return _page(html_of(result, options.plotly), options)


def _report(result: EvaluationResult, job: JobInfo | None, options: PageOptions) -> Rendered:
    return _page(report_of(result, job, include_text=options.include_text, plotly=options.plotly), options)


FORMS: dict[str, Callable[[EvaluationResult, JobInfo | None, PageOptions], Rendered]] = {
    "csv": _table,
    "parquet": _parquet,
    "png": _png,
    "html": _html,
    "report": _report,
}


def file_of(form: str, evaluation: str, packed: bytes, job: str | None = None, options: PageOptions = PAGE) -> Rendered:
    """The result in ``packed``, JSON under gzip, in one of ``FORMS``; ``job`` is its job's description as JSON."""
    result = RESULTS[evaluation].model_validate_json(gzip.decompress(packed))
    return FORMS[form](result, None if job is None else JobInfo.model_validate_json(job), options)


def frequencies_of(
    pairs: Sequence[dict[str, Any]], trained_length: int, title: str, recipe: Recipe, length: int
) -> Rendered:
    """The picture of what an encoding changes."""
    return Rendered(encoding_png(pairs, trained_length, title, recipe, length), "image/png", False)
