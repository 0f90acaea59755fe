"""``ropeway jobs`` and ``ropeway report``: the jobs of a server and their results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from service.cli.evaluations import IncludeText
from service.cli.shared.client import connected
from service.cli.shared.commands import Commands
from service.cli.shared.files import check_files, check_page, refuse_several, save
from service.cli.shared.following import MOST_LISTED, finding_again, finish
from service.cli.shared.measuring import AsCsv, show, show_early
from service.cli.shared.options import KEY, AsJson
from service.cli.shared.terminal import keep_words, new_table, print_table, stderr, stdout
from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.formatting import printable
from service.jobs.records import JobState

if TYPE_CHECKING:
    from service.client import JobInfo, Ropeway

MOST_SHOWN = 3
"""Encodings of a job in a listing."""

PROPOSED = "proposed by the methods"
"""Encodings of a job that names none, of an evaluation that proposes some; others measure the model's own."""

jobs = Commands(help="Jobs of a server: list, show, follow, cancel, resume, results, forget.", no_args_is_help=True)

Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help=f"The server with the jobs. {KEY}", show_default="ROPEWAY_URL, or http://localhost:8000"
    ),
]
Id = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, or a unique prefix of it.")]


def connected_to_jobs(server: str | None) -> AbstractContextManager[Ropeway]:
    """A client of the server with the jobs."""
    return connected(_address(server))


def _address(server: str | None) -> str:
    from service.client.requests import address_of

    return address_of(server)


def whole(client: Ropeway, job_id: str) -> str:
    """The id that starts with ``job_id``.

    Raises:
        typer.BadParameter: when several do, or ``job_id`` is no part of an id.
    """
    if not re.fullmatch("[0-9a-f]+", job_id):
        raise typer.BadParameter(f"{job_id!r} is no id: it has digits and the letters a to f", param_hint="JOB")
    if len(job_id) >= 32:
        return job_id
    found = [job.id for job in client.jobs(limit=MOST_LISTED) if job.id.startswith(job_id)]
    if len(found) > 1:
        raise typer.BadParameter(f"{len(found)} jobs start with {job_id!r}", param_hint="JOB")
    return found[0] if found else job_id


@jobs.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="Most jobs.")] = 20,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    server: Server = None,
) -> None:
    """The newest jobs, newest first."""
    with connected_to_jobs(server) as client:
        found = client.jobs(limit=min(limit + 1, MOST_LISTED), state=state)
    table = new_table("job", "evaluation", "encodings", "state", "units", "created")
    for job in found[:limit]:
        units = f"{job.units_done}/{job.units_total}"
        created = f"{job.created_at:%Y-%m-%d %H:%M}"
        missing = ["the database", *job.not_served] if job.stalled else job.not_served
        waits = f", waits for {', '.join(missing)}" if missing else ""
        encodings, stands = Text(printable(_encodings(job))), Text(job.state + waits, style=_style(job))
        table.add_row(job.id[:12], job.evaluation, encodings, stands, units, created)
    keep_words(table, "encodings")
    print_table(table)
    if len(found) > limit:
        stderr.print(f"there are more than these {limit}: --limit shows them", markup=False, soft_wrap=True)


def _encodings(job: JobInfo) -> str:
    """The encodings that a job measures, the first ones in short. Listings have no request that is too long."""
    if not job.request:
        return ""
    asked = job.request.get("methods")
    if asked is None:
        return PROPOSED if _proposes(job.evaluation) else "default"
    more = len(asked) - MOST_SHOWN
    return ", ".join(map(_label, asked[:MOST_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _proposes(evaluation: str) -> bool:
    known = EVALUATIONS.get(evaluation)  # none of a server of another version
    return known is not None and bool(known.proposes)


def _label(fields: Mapping[str, Any]) -> str:
    from patches import label_of, parse

    try:
        return label_of(parse(dict(fields)))
    except ValueError:  # auto, or a method of another server
        return str(fields.get("method"))


@jobs.command("show")
def show_job(
    job_id: Id,
    as_json: Annotated[bool, typer.Option("--json", help="Print its texts too, not their lengths and hashes.")] = False,
    server: Server = None,
) -> None:
    """One job as JSON. Its texts are lengths and hashes without --json."""
    from service.reports.texts import without_texts

    with connected_to_jobs(server) as client:
        job = client.job(whole(client, job_id))
    shown = job if as_json else job.model_copy(update={"request": without_texts(job.request)})
    typer.echo(shown.model_dump_json(indent=2))


@jobs.command("follow")
def follow(
    job_id: Id,
    cancel_: Annotated[bool, typer.Option("--cancel", help="Ctrl-C cancels the job.")] = False,
    server: Server = None,
) -> None:
    """Follow a job until it ends, then print its result. Ctrl-C ends the following and leaves the job alone."""
    with connected_to_jobs(server) as client:
        job = finish(client, client.job(whole(client, job_id)), _address(server), cancel=cancel_)
        with finding_again(job, _address(server)):
            show(client.result(job.id))


@jobs.command("resume")
def resume(job_id: Id, server: Server = None) -> None:
    """Queue a cancelled or failed job again. Its finished units are not repeated."""
    with connected_to_jobs(server) as client:
        job = client.resume(whole(client, job_id))
    finished = f"{job.units_done} of {job.units_total} units are finished"
    stdout.print(f"{job.id[:12]} is {job.state}; {finished}, and are not repeated unless code or weights have changed")


@jobs.command("cancel")
def cancel(job_id: Id, server: Server = None) -> None:
    """End a job. Its finished units stay in the store for other jobs."""
    with connected_to_jobs(server) as client:
        found = whole(client, job_id)
        client.cancel(found)
        job = client.job(found)
    if job.state in ("done", "failed"):
        ended = "is done" if job.state == "done" else "has failed"
        stdout.print(f"{job.id[:12]} {ended} already: there is nothing to cancel")
    else:
        stdout.print(f"{job.id[:12]} is {job.state}; {job.units_done} of {job.units_total} units are finished")


@jobs.command("forget")
def forget(job_id: Id, server: Server = None) -> None:
    """Remove a job that has ended, and its result."""
    with connected_to_jobs(server) as client:
        client.forget(whole(client, job_id))


@jobs.command("results")
def results(
    job_id: Id,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Save every number as Parquet.")] = None,
    include_text: Annotated[
        bool, typer.Option("--include-text", help="The JSON has the prompts that the evaluation wrote.")
    ] = False,
    server: Server = None,
) -> None:
    """The result of a job. After a cancel or a failure: that of its complete methods, or its finished units."""
    refuse_several({"--parquet": parquet, "--json": as_json, "--csv": as_csv})
    if include_text and not as_json:
        raise typer.BadParameter("--include-text needs --json")
    check_files(("--parquet", parquet))
    with connected_to_jobs(server) as client:
        found = whole(client, job_id)
        if parquet is not None:
            save(parquet, client.download(found, "results.parquet"))
            return
        show_early(client, found, as_json=as_json, as_csv=as_csv, include_text=include_text)


def report(
    job_id: Id,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="JOB.html when absent.")] = None,
    include_text: IncludeText = False,
    server: Server = None,
) -> None:
    """Save the report of a job: one HTML file with every picture and the numbers."""
    check_files(("--output", output))
    check_page("--output", output)
    with connected_to_jobs(server) as client:
        found = whole(client, job_id)
        page = client.download(found, "report.html", include_text=include_text)
        save(output or Path(f"{printable(found)}.html"), page)


def _style(job: JobInfo) -> str:
    return {"done": "green", "failed": "red", "running": "yellow"}.get(job.state, "")
