"""Processes that the parent forks, and the parent's start."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forks.parent import SERVERS, Order, number_of, send

ROOT = Path(__file__).resolve().parent.parent.parent
VARIABLE = "FORKS_OF_TESTS"
"""Names the parent's folder, for all test workers of one run."""

START_S = 120


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, connection: socket.socket) -> None:
        self.pid, self._connection = number_of(_all(connection, 8)), connection
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code, the negative number of the signal that ended it, or None while it runs."""
        try:
            return self.wait(0)
        except (TimeoutError, BlockingIOError):
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            TimeoutError: when it runs for more than ``timeout`` seconds.
        """
        if self._code is None:
            self._connection.settimeout(timeout)
            self._code = number_of(_all(self._connection, 8))
            self._connection.close()
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _all(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the process that forks has ended")
    return data


def forked(function: Callable[..., object], *arguments: Any, log: Path, folder: Path = ROOT) -> Forked:
    """``function(*arguments)`` in a new process in ``folder``, whose standard output and errors go to ``log``.

    ``function`` belongs to a module that may be imported anywhere. Its value is the exit code, as for ``sys.exit``.
    """
    with log.open("wb") as output, open(os.devnull, "rb") as nothing:
        return fork(SERVERS, function, arguments, folder, (nothing.fileno(), output.fileno(), output.fileno()))


def fork(
    kind: str, function: Callable[..., object], arguments: tuple[Any, ...], folder: Path, streams: tuple[int, ...]
) -> Forked:
    """``function(*arguments)`` in a fork of the half that forks ``kind``, with these standard streams."""
    address = folder_of_parent() / kind
    until = time.monotonic() + START_S
    while not address.exists():
        assert time.monotonic() < until, f"the process that forks {kind} has not started: {_log(address.parent)}"
        time.sleep(0.01)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    send(connection, Order(str(folder), dict(os.environ), pickle.dumps((function, arguments))), streams)
    return Forked(connection)


def _log(folder: Path) -> str:
    return (folder / "log").read_text(encoding="utf-8", errors="replace")


def folder_of_parent() -> Path:
    """The folder of this run's parent, which is started once and ends with the process that starts it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_start())
    return Path(os.environ[VARIABLE])


_parents: list[subprocess.Popen[bytes]] = []


def _start() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    command = [sys.executable, "-m", "tests.forks.parent", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        _parents.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
        )
    return folder
