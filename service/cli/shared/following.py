"""A job from its submission to its end, for one who waits in a shell."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from service.cli.shared.measuring import show_early
from service.cli.shared.progress import progress
from service.cli.shared.terminal import fail, stderr
from service.jobs.records import UNFINISHED

MOST_LISTED = 1000
"""Jobs of one answer at most."""

if TYPE_CHECKING:
    from service.client import JobInfo, Ropeway


def finish(
    client: Ropeway, job: JobInfo, server: str | None, *, cancel: bool, as_json: bool = False, as_csv: bool = False
) -> JobInfo:
    """Follow a job of ``server`` to its end and show how far it is. Ctrl-C leaves it alone and says how to come back.
    With ``cancel``, and without a server that goes on, it cancels the job. Without a server, its finished part is
    printed.

    Raises:
        RopewayError: when the server cannot be reached any more.
        typer.Exit: 130 after Ctrl-C.
    """
    from service.client import UnitDone

    label, is_first = job.evaluation, server is not None
    try:
        with progress() as show:
            for item in client.follow(job.id):
                if isinstance(item, UnitDone):
                    label = f"{item.label} {item.length:,} {item.name}"
                else:
                    job = item
                    if is_first and job.state == "queued":
                        _say_what_comes_before(client, job)
                    is_first = False
                    show(job.tokens_done, job.tokens_total, label)
    except KeyboardInterrupt:
        job = _leave(client, job, server, cancel=cancel)
        if job.state != "done":
            if server is None and job.units_done:
                show_early(client, job.id, as_json=as_json, as_csv=as_csv)
            raise typer.Exit(128 + signal.SIGINT) from None
    if job.state != "done":
        why = f": {job.error.message}" if job.error else ""
        ended = "was cancelled" if job.state == "cancelled" else f"has {job.state}"
        fail(f"the job {ended}{why}{_how_to_go_on(job, server)}")
    return job


def _say_what_comes_before(client: Ropeway, job: JobInfo) -> None:
    """Name the first of the jobs that a queued one waits for. Until they end, there is no progress to show."""
    from service.client import RopewayError

    try:
        before = [
            other
            for state in UNFINISHED
            for other in client.jobs(state=state, before=job.id, limit=MOST_LISTED)
            if not (other.not_served or other.stalled or set(other.models).isdisjoint(job.models))
        ]
    except RopewayError:  # the job goes on, whatever the listing does
        return
    if before:
        first = min(before, key=lambda other: other.created_at)
        text = f"job {job.id[:12]} waits; unfinished jobs before it: {len(before)}, the first {first.id[:12]}"
        stderr.print(text, markup=False, soft_wrap=True)


@contextmanager
def finding_again(job: JobInfo, server: str | None) -> Iterator[None]:
    """Ctrl-C before a finished job has been shown ends the command with the way to its result.

    Raises:
        typer.Exit: 130 after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = "the same command" if server is None else f"ropeway jobs results {job.id[:12]} --server {server}"
        stderr.print(f"interrupted; the job is done: {again} shows its result", markup=False, soft_wrap=True)
        raise typer.Exit(128 + signal.SIGINT) from None


def _leave(client: Ropeway, job: JobInfo, server: str | None, *, cancel: bool) -> JobInfo:
    """The job after Ctrl-C, which may have come after its end."""
    if server is None or cancel:
        client.cancel(job.id)
        job = client.job(job.id)
        message = f"cancelled{_how_to_go_on(job, server) or ': no unit is finished, so nothing is kept'}"
    else:
        message = f"the job goes on; come back to it: ropeway jobs follow {job.id[:12]} --server {server}"
    if job.state != "done":
        stderr.print(message, markup=False, soft_wrap=True)
    return job


def _how_to_go_on(job: JobInfo, server: str | None) -> str:
    """The next command for a job that ended early; the store keeps its finished units."""
    if not job.units_done:
        return ""
    finished = f"; {job.units_done} of {job.units_total} units are finished"
    if server is None:
        return f"{finished}: the same command takes them over"
    where = f"{job.id[:12]} --server {server}"
    return f"{finished}: ropeway jobs results {where} shows them, ropeway jobs resume {where} goes on"
