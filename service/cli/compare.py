"""``ropeway compare``: results of several models or versions side by side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from service.cli.jobs import Server, connected_to_jobs, whole
from service.cli.shared.files import check_outputs, save, save_pictures
from service.cli.shared.measuring import AsCsv, PictureName, Plots, show
from service.cli.shared.options import AsJson
from service.cli.shared.terminal import fail, stdout
from service.evaluation.formatting import printable

if TYPE_CHECKING:
    from service.evaluation.results import EvaluationResult

JOB = re.compile("[0-9a-f]+")


def compare(  # noqa: PLR0913 - one argument per option
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]RESULT...",
            help="Each a file that `--json` printed, or a job. NAME is for the figure, not its model or place.",
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Compare every method with this one: yarn:4, or its name in the table.",
            show_default="that of the first result with the same label",
        ),
    ] = None,
    plots: Plots = None,
    picture_name: PictureName = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Save a report as one HTML file.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: Server = None,
) -> None:
    """Compare results of one evaluation: two models, a model before and after training, two number formats."""
    from service.evaluation.comparison.checks import NotComparable
    from service.evaluation.comparison.comparing import compared

    check_outputs(plots, picture_name, report, as_json=as_json, as_csv=as_csv)
    try:
        result = compared(*_found(results, server), baseline=baseline)
    except NotComparable as error:
        hint = ", as in NAME=RESULT" if error.field == "names" else ""
        fail(f"--baseline: {error}" if error.field == "baseline" else f"{error}{hint}")
    show(result, as_json=as_json, as_csv=as_csv)
    if not (as_json or as_csv):
        cautions = result.cautions()  # below the table already
        for sentence in result.words():
            if sentence not in cautions:
                stdout.print(Text(printable(sentence)))
    if report is not None:
        from service.reports.html import report_of

        save(report, report_of(result).encode())
    save_pictures(result, plots, picture_name)


def _found(arguments: Sequence[str], server: str | None) -> tuple[list[EvaluationResult], list[str], list[str]]:
    """The results of files and of jobs on the server, their names where given, and their places."""
    parts = [_parts(argument) for argument in arguments]
    results = [_of_file(place) if _is_file(place) else _of_job(place, server) for _, place in parts]
    places = [Path(place).stem if _is_file(place) else place[:12] for _, place in parts]
    if len(set(places)) < len(places):
        places = [place for _, place in parts]
    return results, [name for name, _ in parts], places


def _parts(argument: str) -> tuple[str, str]:
    """(name, file or job) of an argument. A file may have the sign of equality in its path."""
    if Path(argument).exists() or "=" not in argument:
        return "", argument
    splits = [(argument[: at.start()], argument[at.end() :]) for at in re.finditer("=", argument)]
    return next(((name, place) for name, place in splits if Path(place).exists()), splits[0])


def _is_file(place: str) -> bool:
    return Path(place).exists() or not JOB.fullmatch(place)


def _of_file(file: str) -> EvaluationResult:
    from pydantic import TypeAdapter, ValidationError

    from service.evaluation.catalogue import any_result

    try:
        content = Path(file).read_bytes()
    except OSError as error:
        fail(f"{file}: {error.strerror}")
    try:
        result: EvaluationResult = TypeAdapter(any_result()).validate_json(content)
    except ValidationError:
        fail(f"{file}: is no result of an evaluation: save one with `ropeway perplexity --json > {file}`")
    return result


def _of_job(job: str, server: str | None) -> EvaluationResult:
    with connected_to_jobs(server) as client:
        return client.result(whole(client, job))
