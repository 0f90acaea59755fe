"""A shell for the commands, in this process."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from functools import cache

from typer import testing
from typer.testing import CliRunner, Result

from service.cli.commands import app

testing._get_command = cache(testing._get_command)  # every run would make all commands anew, in 30 ms


def ropeway(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run in this process; what the command does to signals, hooks and warnings is undone."""
    hooks = sys.excepthook, threading.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments, input=stdin)
    finally:
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def succeeded(*arguments: str) -> str:
    result = ropeway(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
