"""A shell for the commands, in this process."""

from __future__ import annotations

import signal

from typer.testing import CliRunner, Result

from service.cli import app


def ropeway(*arguments: str, stdin: str | None = None) -> Result:
    """Run in this process; what the command does to signals is undone."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments, input=stdin)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
