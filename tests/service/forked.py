"""Processes that begin with the libraries loaded: forks of one process, which imports them once per test worker.

Importing torch and transformers takes 8 s of CPU time, which every server of the tests would spend again.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROOT


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests need."""

    def __init__(self, pid: int, exit_code: Path) -> None:
        self.pid, self._exit_code = pid, exit_code
        self._process = psutil.Process(pid) if psutil.pid_exists(pid) else None

    def poll(self) -> int | None:
        """Exit code, the negative number of the signal that ended it, or None while it runs."""
        return int(self._exit_code.read_text()) if self._exit_code.exists() else None

    def wait(self, timeout: float | None = None) -> int:
        if self._process:
            self._process.wait(timeout)
        while (code := self.poll()) is None:  # reaped, not yet written
            time.sleep(0.001)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked(function: Callable[..., object], *arguments: Any, log: Path, folder: Path = ROOT) -> Forked:
    """``function(*arguments)`` in a new process in ``folder``, whose standard output and errors go to ``log``.

    ``function`` belongs to a module that may be imported anywhere. Its value is the exit code, as for ``sys.exit``.
    """
    parent, exit_codes = _parent()
    order = {"folder": str(folder), "log": str(log), "environment": dict(os.environ)}
    order["call"] = base64.b64encode(pickle.dumps((function, arguments))).decode()
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps(order) + "\n")
    parent.stdin.flush()
    pid = int(parent.stdout.readline())
    return Forked(pid, exit_codes / str(pid))


@cache
def _parent() -> tuple[subprocess.Popen[str], Path]:
    """The process that forks, and the folder where it writes exit codes. It ends with this one."""
    exit_codes = Path(tempfile.mkdtemp(prefix="exit-codes-"))
    command = [sys.executable, "-m", "tests.service.forked", str(exit_codes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes), exit_codes  # type: ignore[call-overload]


def _fork_for_ever(exit_codes: Path) -> None:
    import service.app
    import service.cli.serve  # noqa: F401

    def reap(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            unfinished = exit_codes / f"{pid}.part"
            unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
            unfinished.rename(exit_codes / str(pid))

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(order)
        print(pid, flush=True)


def list_modules() -> None:
    """Print the modules that a server loads before its settings are known."""
    print(*sys.modules)


def _become(order: dict[str, Any]) -> None:
    """Never returns: the interpreter ends as after any script, with its threads and exit handlers."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    function, arguments = pickle.loads(base64.b64decode(order["call"]))
    sys.exit(function(*arguments))


if __name__ == "__main__":
    _fork_for_ever(Path(sys.argv[1]))
