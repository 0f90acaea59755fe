"""Options, bodies and output that all commands of evaluations share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from service.cli.shared.files import as_utf_8, documents
from service.cli.shared.options import check_body, different, encodings, lengths
from service.cli.shared.terminal import new_table, print_table, stderr, stdout
from service.evaluation.formatting import printable

if TYPE_CHECKING:
    from service.client import EvaluationResult, Ropeway

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE]...",
        help="Text files, each a document; .jsonl: a `text` per line; '-' is stdin. None: a built-in document.",
    ),
]
LengthList = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help="256,512 or start:stop:step.",
        metavar="LIST",
        show_default="doubling from the trained length",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=2,
        max=(1 << 24) - 1,
        help="Tokens of each document that are used; longer ones are cut.",
        show_default="all",
    ),
]
Plots = Annotated[
    list[Path] | None,
    typer.Option("--plot", metavar="FILE", help="Save a picture as .png, .svg, .pdf or .html; repeatable."),
]
PictureName = Annotated[
    str | None,
    typer.Option("--picture", metavar="NAME", help="The picture of --plot.", show_default="the main one"),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print every number as CSV.")]

RESULT = "`ropeway jobs results JOB` prints the result"
REPORT = "`ropeway report JOB` saves a report with every picture"
LATER = {
    "--json": RESULT,
    "--csv": RESULT,
    "--plot": REPORT,
    "--report": REPORT,
    "--policy": "the same command without --background takes the finished units over and saves the policy",
    "--cancel": "`ropeway jobs cancel JOB` cancels the job",
}
"""Options that need the end of a job, and the later way for a job in the background."""


def refuse_without_effect(server: str | None, *, background: bool, cancel: bool, **outputs: object) -> None:
    """Refuse options of a job that change nothing; ``outputs`` are values of options by name.

    Raises:
        typer.BadParameter: with the other way to what they are for.
    """
    if background and server is None:
        raise typer.BadParameter("--background needs --server: a server started for this command ends with it")
    if cancel and server is None:
        raise typer.BadParameter("--cancel needs --server: without one, Ctrl-C cancels the job anyway")
    given = {f"--{name}": value for name, value in outputs.items()} | {"--cancel": cancel}
    for option, way in LATER.items():
        if background and given.get(option):
            raise typer.BadParameter(f"--background and {option} exclude each other: {way}")


def body_of(  # noqa: PLR0913 - one argument per option
    name: str,
    own: Mapping[str, Any],
    files: list[str],
    pe: list[str] | None,
    lengths_: str | None,
    max_tokens: int | None,
    model: str | None,
    server: str | None,
) -> dict[str, Any]:
    """The body of the evaluation ``name``; ``own`` are fields without a shared option.

    Raises:
        typer.BadParameter: for a body that no server would take. A named server checks its own.
    """
    from service.evaluation.catalogue import EVALUATIONS

    names, texts = documents(files)
    request = EVALUATIONS[name].request
    shared = {"input": texts, "names": names or None, "max_tokens": max_tokens}
    given = {field: value for field, value in shared.items() if value is not None}
    given |= {field: value for field, value in own.items() if field == "short_documents"}
    body: dict[str, Any] = {
        **request.placed(given, {field: value for field, value in own.items() if field not in given}),
        # Beside factors, an encoding needs no factor.
        "methods": different(pe, encodings(pe, check=server is None and "factors" not in own)),
        "lengths": lengths(lengths_),
        "model": model if server else None,
    }
    body = as_utf_8(body)
    if server is None:
        check_body(request, body)
    return body


def show(result: EvaluationResult, *, as_json: bool = False, as_csv: bool = False) -> None:
    """Print a result as JSON, CSV or a table."""
    from service.evaluation.comparison.within import changes_of
    from service.evaluation.tables import csv_of
    from service.reports.terminal import table_beside, table_of

    if result.partial is not None:
        stderr.print(f"partial: {result.partial.words()}", markup=False, soft_wrap=True, style="yellow")
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    elif as_csv:
        typer.echo(csv_of(result), nl=False)
    else:
        stdout.print(Text(printable(result.heading()), style="bold"))
        print_table(table_of(result, stdout.width))
        if changes := changes_of(result):
            stdout.print(Text(printable(changes.title), style="bold"))
            print_table(table_beside(changes, result, stdout.width))


def show_early(
    client: Ropeway, job_id: str, *, as_json: bool = False, as_csv: bool = False, include_text: bool = False
) -> None:
    """Print the result of a job that may have ended early: of its complete methods, else its finished units.

    Raises:
        RopewayError: when there is neither.
    """
    from service.client import RopewayError

    try:
        show(client.result(job_id, include_text=include_text), as_json=as_json, as_csv=as_csv)
    except RopewayError as error:
        without_result = error.status == 409 and error.param is None
        if not without_result or "units.csv" not in client.job(job_id).links:
            raise
        _show_units(client, job_id, as_json=as_json, as_csv=as_csv, include_text=include_text)


def _show_units(client: Ropeway, job_id: str, *, as_json: bool, as_csv: bool, include_text: bool) -> None:
    stderr.print("the job has no result; these are its finished units", style="yellow")
    units = client.units(job_id, include_text=include_text)
    if as_json:
        typer.echo(json.dumps([unit.model_dump() for unit in units], indent=2))
    elif as_csv:
        typer.echo(client.download(job_id, "units.csv").decode(), nl=False)
    else:
        table = new_table("unit", "length", "of", "numbers", numbers=("length",))
        for unit in units:
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in unit.summary.items())
            table.add_row(*map(Text, (unit.label, f"{unit.length:,}", unit.name, numbers)))
        print_table(table)
