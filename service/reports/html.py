"""A result as one HTML page; standalone, it loads nothing, works offline and can be printed.

Whatever comes from a request is escaped by the template. The only scripts are Plotly's and the one that draws.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.formatting import counted
from service.evaluation.results import DocumentInfo, EvaluationResult
from service.evaluation.setup import Setup
from service.figures.picture import Picture
from service.figures.results import pictures_of
from service.figures.web.page import css, drawing, embedded, plotly_script, template
from service.reports.numbers import Table, all_numbers, columns_left_out, intervals_note, summaries
from service.reports.texts import without_texts

if TYPE_CHECKING:
    from service.jobs.records import JobInfo

NOT_ASKED = {"methods", "evaluations", "answer", "documents", "evaluation", "model", "trained_length", "setup"}
"""Fields of a result that the page shows outside of its list of parameters."""
MOST_ROWS = 1000
"""Of the table of every number."""
MOST_PICTURE_ROWS = 5000
"""Rows of a picture's numbers that the page carries as CSV."""
FILES = ("results.csv", "results.json")
"""A job's files with all the numbers."""
REUSED = "no time: every unit was known already"


class Shown(NamedTuple):
    """A picture on the page: alive as ready HTML, still for print, and its numbers unless they are many."""

    title: str
    subtitle: str
    caption: str
    alive: str
    still: str
    numbers: str
    file: str


class MethodShown(NamedTuple):
    label: str
    model: str
    encoding: str


def report_of(
    result: EvaluationResult,
    job: JobInfo | None = None,
    *,
    include_text: bool = False,
    plotly: str | None = None,
) -> str:
    """The whole page. A job knows what was posted; without one the page says so. The texts of a request are on the page
    only where ``include_text`` asks for them.

    With the address ``plotly`` the page loads Plotly's script from there; without it, everything is in the page.
    """
    asked = job and job.request
    shown = asked if include_text or not asked else without_texts(asked)
    numbers, tables = all_numbers(result, MOST_ROWS), summaries(result)
    return template("service.reports", "report.html").render(
        title=_title(result),
        css=css(),
        facts=facts_of(result, job),
        answer=result.words(),
        pictures=[_shown(picture, index) for index, picture in enumerate(pictures_of(result))],
        summaries=tables,
        left_out=columns_left_out(result),
        intervals=intervals_note(result)
        if any(cell.interval for table in tables for _, cells in table.rows for cell in cells)
        else "",
        methods=[
            MethodShown(name, method.model, _json(method.pe))
            for name, method in zip(result.names(), result.methods, strict=True)
        ],
        numbers=_titled(numbers.table),
        numbers_told=_told(len(numbers.table.rows), numbers.rows),
        files=_files(job),
        standalone=plotly is None,
        path=result.evaluation if result.evaluation in EVALUATIONS else "",
        request=_json(shown) if shown else None,
        texts_left_out=shown != asked,
        prompts=_prompts(result),
        is_with_text=include_text,
        prompts_left_out=job is not None and any(output.prompt is None for output in result.outputs()),
        plotly=plotly_script(plotly),
        drawing=drawing(),
    )


def _title(result: EvaluationResult) -> str:
    partial = " (partial)" if result.scope() else ""
    return f"{result.evaluation.replace('_', ' ').capitalize()}: {result.model}{partial}"


def _files(job: JobInfo | None) -> Sequence[str]:
    return [] if job is None else [f"/jobs/{job.id}/{file}" for file in FILES]


def _told(shown: int, rows: int) -> str:
    return (
        f"{rows:,} rows, full precision" if shown == rows else f"The first {shown:,} of {rows:,} rows, full precision"
    )


def facts_of(result: EvaluationResult, job: JobInfo | None = None) -> list[tuple[str, str]]:
    """The parameters of the evaluation, as names and values."""
    asked = result.model_dump(mode="json", exclude={*NOT_ASKED, "id", "seconds", "links", "partial"})
    facts = [("model", result.model), ("trained length", f"{result.trained_length:,} tokens")]
    documents: list[DocumentInfo] = getattr(result, "documents", [])
    if documents:
        texts = [f"{d.name} ({d.tokens:,} tokens, {d.bytes:,} bytes)" for d in documents]
        facts.append(("documents", "; ".join(texts)))
    facts += [(name.replace("_", " "), _fact(value)) for name, value in asked.items()]
    if result.partial is not None:
        facts.append(("partial", result.partial.words()))
    if result.seconds is not None:
        facts.append(("measured in", f"{result.seconds:,.1f} s"))
    if job is not None:
        facts += [
            ("job", job.id),
            ("started", str(job.started_at or job.created_at)),
            ("units", f"{job.units_done:,}, of which {job.units_reused:,} were not measured again"),
            ("measured in", f"{job.seconds:,.1f} s" if job.units_reused < job.units_done else REUSED),
        ]
    if result.setup is not None:
        facts += _setup(result.setup)
    return [(name, value) for name, value in facts if value]


def _setup(setup: Setup) -> list[tuple[str, str]]:
    """One line for the code, and one for each model."""
    facts = [("measured with", f"ropeway {setup.ropeway}, code {setup.code[:12]}")]
    for name, model in setup.models.items():
        scheme = f" quantized by {model.quantization}" if model.quantization else ""
        at = f"{model.hardware}, {model.dtype}{scheme}, {counted(model.threads, 'thread')}"
        ranks = f", {model.tensor_parallel} processes" if model.tensor_parallel > 1 else ""
        versions = f"torch {model.torch}, transformers {model.transformers}"
        facts.append((f"setup of {name}", f"weights {model.fingerprint[:12]}; {versions}; {at}{ranks}"))
    return facts


def _fact(value: object) -> str:
    """A value as a reader writes it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        shown = {name: inner for name, inner in value.items() if name not in ("pe", "partial")}
        return ", ".join(f"{name.replace('_', ' ')} {_fact(inner)}" for name, inner in shown.items())
    if isinstance(value, list):
        return ", ".join(_fact(item) for item in value)
    if isinstance(value, int | float):
        return f"{value:,.10g}"
    return "" if value is None else str(value)


def _prompts(result: EvaluationResult) -> dict[str, str]:
    """Headings by prompt: methods share them."""
    asked = [(output.prompt, output.heading()) for output in result.outputs()]
    return {prompt: heading for prompt, heading in asked if prompt is not None}


def _shown(picture: Picture, index: int) -> Shown:
    inside = len(picture.rows) <= MOST_PICTURE_ROWS
    return Shown(
        title=picture.title,
        subtitle=picture.subtitle,
        caption=picture.caption,
        alive=embedded(picture, f"figure-{index}"),
        still=_data("image/png", picture.png()),
        numbers=_data("text/csv;charset=utf-8", picture.csv().encode()) if inside else "",
        file=picture.name,
    )


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _titled(table: Table) -> Table:
    return table._replace(columns=[column.replace("_", " ") for column in table.columns])


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
