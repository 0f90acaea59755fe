"""Pictures and reports for routes. Call these on a thread: the first one loads the libraries that draw."""

from __future__ import annotations

from typing import Any

from service.evaluation.results import EvaluationResult
from service.jobs.records import JobInfo


def png(result: EvaluationResult) -> bytes:
    """The result's first picture."""
    from service.figures.results import png_of

    return png_of(result)


def html(result: EvaluationResult) -> str:
    """The result's pictures as a page that reacts to the mouse."""
    from service.figures.results import html_of

    return html_of(result)


def report(result: EvaluationResult, job: JobInfo) -> str:
    """What a job was asked and what came out, as one page."""
    from service.reports.html import report_of

    return report_of(result, job)


def frequencies(*arguments: Any) -> bytes:
    """What an encoding does to the frequencies of a model, as PNG."""
    from service.figures.frequencies import frequency_png

    return frequency_png(*arguments)
