"""A result as one HTML file: it loads nothing, works offline and can be printed.

Whatever comes from a request is escaped by the template. The only scripts are Plotly's and one per figure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from plotly.offline import get_plotlyjs

from service.evaluation.results import DocumentInfo, EvaluationResult
from service.figures.picture import Picture
from service.figures.results import pictures_of
from service.reports.numbers import Table, all_numbers, summaries
from service.reports.words import words_of

if TYPE_CHECKING:
    from service.jobs.records import JobInfo

NOT_ASKED = {"methods", "evaluations", "answer", "documents", "evaluation", "model", "trained_length"}
"""Fields of a result that are told in other places than the list of what was asked."""


class Shown(NamedTuple):
    """A picture on the page: alive as HTML that is ready, still for print, and its numbers."""

    title: str
    caption: str
    alive: str
    still: str
    numbers: str
    file: str


class MethodShown(NamedTuple):
    label: str
    model: str
    encoding: str


def report_of(result: EvaluationResult, job: JobInfo | None = None, body: Mapping[str, Any] | None = None) -> str:
    """The whole page. ``body`` is what was posted; a job knows it itself, and without either the page says so.

    Raises:
        ValueError: for an evaluation without pictures.
    """
    asked = body if job is None else job.request
    return _template().render(
        title=f"{result.evaluation.replace('_', ' ').capitalize()}: {result.model}",
        facts=facts_of(result, job),
        answer=words_of(result),
        pictures=[_shown(picture, index) for index, picture in enumerate(pictures_of(result))],
        summaries=summaries(result),
        methods=[
            MethodShown(method.label, method.model, _json(method.pe)) for method in getattr(result, "methods", ())
        ],
        numbers=_titled(all_numbers(result)),
        path=result.evaluation,
        request=_json(asked) if asked else None,
        plotly=get_plotlyjs(),
    )


def facts_of(result: EvaluationResult, job: JobInfo | None = None) -> list[tuple[str, str]]:
    """What was asked, as names and values."""
    numbers = result.numbers()
    facts = [("model", result.model), ("trained length", f"{result.trained_length:,} tokens")]
    documents: list[DocumentInfo] = getattr(result, "documents", [])
    if documents:
        told = [f"{d.name} ({d.tokens:,} tokens, {d.bytes:,} bytes)" for d in documents]
        facts.append(("documents", "; ".join(told)))
    facts += [(name.replace("_", " "), _fact(value)) for name, value in numbers.items() if name not in NOT_ASKED]
    if result.seconds is not None:
        facts.append(("measured in", f"{result.seconds:,.1f} s"))
    if job is not None:
        facts += [
            ("job", job.id),
            ("started", str(job.started_at or job.created_at)),
            ("units", f"{job.units_done:,}, of which {job.units_reused:,} were known already"),
            ("measured in", f"{job.seconds:,.1f} s"),
        ]
    return [(name, value) for name, value in facts if value]


def _fact(value: object) -> str:
    """A value as a reader writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_fact(inner)}" for name, inner in value.items() if name != "pe")
    if isinstance(value, list):
        return ", ".join(_fact(item) for item in value)
    if isinstance(value, int | float):
        return f"{value:,.10g}"
    return "" if value is None else str(value)


def _shown(picture: Picture, index: int) -> Shown:
    return Shown(
        title=picture.title,
        caption=picture.caption,
        alive=picture.fragment(f"figure-{index}"),
        still=f"data:image/png;base64,{base64.b64encode(picture.png()).decode()}",
        numbers=f"data:text/csv;charset=utf-8;base64,{base64.b64encode(picture.csv().encode()).decode()}",
        file=picture.name,
    )


def _titled(table: Table) -> Table:
    return table._replace(columns=[column.replace("_", " ") for column in table.columns])


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


@cache
def _template() -> Template:
    text = files("service.reports").joinpath("report.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        text
    )
