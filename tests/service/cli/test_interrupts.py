"""Ctrl-C in a command and around it: no traceback, exit code 130, one word."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from service.cli import interrupts, server
from service.cli.shared.client import connected
from service.settings import Settings
from tests.conftest import ROOT

INTERRUPTED = """
import signal, sys

class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            Lost() if name == "torch" else signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from service.cli import app
app(sys.argv[2:])
"""
"""``ropeway``, with Ctrl-C as the module of the first argument is looked for. For torch it comes in a ``__del__``."""


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        ("typer", ["methods"], ""),
        ("service.cli.serve", ["methods"], ""),
        ("patches.registry", ["methods"], "interrupted"),
        ("torch", ["generate", "Once", "--model", "demo"], "loading demo\nloading demo was interrupted"),
    ],
    ids=["early import", "late import", "command", "libraries"],
)
def test_ctrl_c_while_modules_are_imported_prints_no_traceback(module: str, arguments: list[str], told: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module, *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr.strip()) == (130, "", told)


def test_ctrl_c_stays_ignored_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for a command in the background of a script."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.be_quiet()
        interrupts.be_heard()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_ctrl_c_ends_the_stop_of_a_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []

    @contextmanager
    def local_server(_: Settings) -> Iterator[str]:
        yield "http://127.0.0.1:9"
        handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(server, "local_server", local_server)
    monkeypatch.setattr(server, "load_libraries", lambda: None)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # commands of other tests leave another here
    try:
        with connected(None):
            handlers.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, usual)
    assert handlers == [signal.default_int_handler, interrupts.end_at_once]
