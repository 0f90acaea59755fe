"""``ropeway passkey | needle | ruler | long_perplexity | probe | sweep``: one command per evaluation, with an option
for every field of its body."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperCommand

from service.cli.client import connected
from service.cli.options import Encodings, ModelName, Server, encodings, lengths
from service.cli.perplexity import Files, Lengths, check_plot, documents
from service.cli.terminal import fail, stderr, stdout
from service.client import EvaluationResult, JobInfo, Ropeway, UnitDone

COMMANDS = {
    "long-perplexity": "Perplexity over the tokens that need long context, by context length.",
    "passkey": "Is a number that is hidden in filler found again, by length and depth?",
    "needle": "Is a sentence that is hidden in documents found again, by length and depth?",
    "ruler": "RULER's synthetic tasks: needles, variables, words; and the effective length.",
    "probe": "Attention by distance, copying by distance, loss by position.",
    "sweep": "Methods x factors x lengths x evaluations: the best, and the cheapest that is good enough.",
}

SHARED = {"evaluation", "model", "methods", "lengths", "input", "stream", "background", "timeout_s"}
"""Fields that have options of their own, or none."""

_FIELDS = "ropeway.fields"


class EvaluationCommand(TyperCommand):
    """Adds an option per own field of the evaluation's body, read from its model when the command is used and not
    before: that loads torch."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        given = super().get_params(ctx)
        taken = {option for parameter in given for option in parameter.opts}
        own = [option for option in _own_options(str(self.name)) if option.opts[0] not in taken]
        return [*own, *given]


def _own_options(command: str) -> list[click.Parameter]:
    from service.cli.schema import type_text
    from service.evaluation.catalogue import EVALUATIONS

    schema = EVALUATIONS[command.replace("-", "_")].request.model_json_schema()
    definitions = schema.get("$defs", {})

    def option(name: str, field: dict[str, Any]) -> click.Option:
        flag = f"--{name.replace('_', '-')}"
        if field.get("type") == "boolean":
            return click.Option(
                [f"{flag}/--no-{flag[2:]}", name],
                default=None,
                help=_help(field),
                expose_value=False,
                callback=_keep,
            )
        metavar = "JSON" if "$ref" in json.dumps(field) else type_text(field).replace(" ", "-").upper()[:40]
        return click.Option([flag, name], metavar=metavar, help=_help(field), expose_value=False, callback=_keep)

    assert isinstance(definitions, dict)
    return [option(name, field) for name, field in schema["properties"].items() if name not in SHARED]


def _help(field: dict[str, Any]) -> str:
    text = str(field.get("description") or field.get("title", ""))
    default = field.get("default")
    return text if default is None else f"{text} [default: {json.dumps(default)}]"


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None:
        ctx.meta.setdefault(_FIELDS, {})[option.name] = value if isinstance(value, bool) else value_of(value)


def value_of(text: str) -> Any:
    """An option's value: JSON, a list with commas, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return [value_of(item) for item in text.split(",")] if "," in text and '"' not in text else text


def command(name: str, summary: str, app: typer.Typer) -> None:
    """Add ``ropeway NAME`` to ``app``."""

    @app.command(name, cls=EvaluationCommand, help=summary)
    def run(  # noqa: PLR0913 - one argument per option
        ctx: typer.Context,
        files: Files = None,
        pe: Encodings = None,
        lengths_: Lengths = None,
        model: ModelName = None,
        plots: Annotated[
            list[Path] | None, typer.Option("--plot", metavar="FILE", help="Save the first picture as .png or .html.")
        ] = None,
        report: Annotated[Path | None, typer.Option(metavar="FILE", help="Save a report as one HTML file.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
        as_csv: Annotated[bool, typer.Option("--csv", help="Print every number as CSV.")] = False,
        background: Annotated[
            bool, typer.Option("--background", help="With --server: print the job's id and leave.")
        ] = False,
        server: Server = None,
    ) -> None:
        if as_json and as_csv:
            raise typer.BadParameter("--json and --csv exclude each other")
        if background and server is None:
            raise typer.BadParameter("--background needs --server: a server started for this command ends with it")
        for path in plots or []:
            check_plot(path)
        own = dict(ctx.meta.get(_FIELDS, {}))
        names, texts = documents(files or [])
        fields = {
            **own,
            **_placed(name, texts, own),
            "methods": encodings(pe, check=server is None),
            "lengths": lengths(lengths_),
            "model": model if server else None,
        }
        with connected(server, model) as client:
            job = client.submit(name.replace("-", "_"), **fields)
            if background:
                stdout.print(job.id)
                return
            finish(client, job)
            result = client.result(job.id)
            if report is not None:
                save(report, client.download(job.id, "report.html"))
        named(result, names)
        show(result, as_json=as_json, as_csv=as_csv)
        for path in plots or []:
            save_picture(result, path)


def _placed(name: str, texts: str | list[str] | None, own: dict[str, Any]) -> dict[str, Any]:
    """Where the documents stand in the body: a sweep has them in its parts."""
    if texts is None:
        return {}
    if name != "sweep":
        return {"input": texts}
    parts = own.get("evaluations") or [{"evaluation": "perplexity"}]
    parts = [{"evaluation": part} if isinstance(part, str) else part for part in parts]
    return {"evaluations": [{"input": texts, **part} for part in parts]}


def finish(client: Ropeway, job: JobInfo) -> JobInfo:
    """Follow a job to its end with a progress bar. Ctrl-C cancels it; what is finished stays in the server's store.

    Raises:
        RopewayError: when the server cannot be reached any more.
    """
    columns = (
        *(SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()),
        *(TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("waiting", total=max(job.tokens_total, 1))
        try:
            for item in client.follow(job.id):
                if isinstance(item, UnitDone):
                    progress.update(task, description=f"{item.label} {item.length:,} {item.name}")
                else:
                    job = item
                    progress.update(task, completed=item.tokens_done)
        except KeyboardInterrupt:
            client.cancel(job.id)
            raise
    if job.state != "done":
        fail(f"the job has {job.state}{f': {job.error.message}' if job.error else ''}")
    return job


def named(result: EvaluationResult, names: Sequence[str]) -> None:
    """Put the files' names where the server knows only numbers."""
    for document, name in zip(getattr(result, "documents", []), names, strict=False):
        document.name = name


def show(result: EvaluationResult, *, as_json: bool, as_csv: bool) -> None:
    """Print a result as JSON, CSV or a table."""
    from service.evaluation.tables import csv_of
    from service.reports.terminal import table_of

    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    elif as_csv:
        typer.echo(csv_of(result), nl=False)
    else:
        for part in table_of(result):
            stdout.print(part)


def save(path: Path, content: bytes) -> None:
    """Write a file and say so."""
    try:
        path.write_bytes(content)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    stderr.print(f"saved {path}", markup=False, soft_wrap=True)


def save_picture(result: EvaluationResult, path: Path) -> None:
    """Write the first picture as PNG or HTML, by the file's ending."""
    from service.figures.results import html_of, png_of

    save(path, png_of(result) if path.suffix.lower() == ".png" else html_of(result).encode())


def add_to(app: typer.Typer) -> None:
    """Every command, in the order of the table."""
    for name, summary in COMMANDS.items():
        command(name, summary, app)
