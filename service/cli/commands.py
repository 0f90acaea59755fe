"""Every command, under ``ropeway``."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from service.cli import evaluations, interrupts
from service.cli.compare import compare
from service.cli.demo import demo
from service.cli.export import export
from service.cli.generate import generate
from service.cli.jobs import jobs, report
from service.cli.keys import keys
from service.cli.listings import methods, models
from service.cli.scale import scale
from service.cli.serve import serve
from service.cli.shared.commands import Commands
from service.cli.shared.terminal import stderr

app = Commands(
    name="ropeway",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"ropeway {version('ropeway')}")
        raise typer.Exit


@contextmanager
def _interruptible() -> Iterator[None]:
    """A command, which Ctrl-C ends with a word: typer makes exit code 130 of the exception."""
    if threading.current_thread() is threading.main_thread():
        interrupts.be_heard()
    try:
        yield
    except KeyboardInterrupt:
        stderr.print("\ninterrupted" if stderr.is_terminal else "interrupted")  # a terminal's cursor is behind ^C
        raise
    finally:
        _end_quietly()


def _end_quietly() -> None:
    """From the end of a command on, Ctrl-C ends the process at once. Python would print a traceback as it exits."""
    if threading.current_thread() is not threading.main_thread():
        return
    try:
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, interrupts.end_at_once)
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # Python resets handlers soon after


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One loaded language model, a positional encoding per request."""
    context.with_resource(_interruptible())


for command in (serve, generate):
    app.command()(command)
evaluations.add_to(app)
app.add_typer(jobs, name="jobs")
app.add_typer(keys, name="keys")
app.add_typer(scale, name="scale")
for listing in (compare, report, methods, models, export, demo):
    app.command()(listing)
