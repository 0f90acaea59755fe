"""Servers with other settings, in this process or in another, and requests to them."""

from __future__ import annotations

import functools
import importlib
import json
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

import service.app
from service.cli import app
from service.cli.server import local_server
from service.engine.engine import Engine
from service.jobs.database.opening import Database
from service.settings import Settings
from tests.forks.command import ropeway
from tests.forks.process import Forked, forked
from tests.service.waiting import until as until
from tests.service.waiting import wait_for as wait_for

LONG = [5, 6, 7]
"""A prompt that the tiny model goes on from for hundreds of tokens."""

SHORT: dict[str, Any] = {"prompt": LONG, "max_new_tokens": 12}

SMALL: dict[str, Any] = {
    "cache_tokens": 2048,
    "score_tokens": 2048,
    "max_batch_tokens": 128,
    "max_new_tokens": 2000,
    "score_chunk": 64,
}


@functools.cache
def _tables() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"
        Database(f"sqlite:///{path}").close()
        return path.read_bytes()


def with_tables(path: Path) -> str:
    """URL of a new SQLite database of jobs in the file ``path``, without its migrations."""
    path.write_bytes(_tables())
    return f"sqlite:///{path}"


@contextmanager
def serving(checkpoints: Path, **settings: Any) -> Iterator[tuple[str, FastAPI]]:
    """(base URL, application) of a running server of the tiny models."""
    apps: list[FastAPI] = []
    create = service.app.create_app

    def kept(given: Settings) -> FastAPI:
        apps.append(create(given))
        return apps[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.app, "create_app", kept)
        own = {"model": str(checkpoints), "database_url": with_tables(checkpoints / f"{uuid.uuid4().hex}.db")}
        with local_server(Settings(_env_file=None, **SMALL | own | settings)) as url:
            yield url, apps[0]


def engine_of(app: FastAPI) -> Engine:
    """The engine of the default model."""
    engine: Engine = app.state.models.default.engine
    return engine


def runner_of(app: FastAPI) -> Any:
    """The part that runs a step: tests make it fail."""
    return engine_of(app).thread.manager.batch_processor.model_runner  # type: ignore[union-attr]


def generate(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=SHORT | body, timeout=60)


def token_ids(url: str, **body: Any) -> list[int]:
    answer = generate(url, **body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["results"][0]["token_ids"]
    return ids


def events(url: str, path: str = "/generate", **body: Any) -> list[tuple[str, Any]]:
    """(event name, data) of a whole stream."""
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=60) as answer:
        return events_of(answer)


def events_of(answer: httpx.Response) -> list[tuple[str, Any]]:
    """(event name, data) of a stream that has been opened."""
    found, name = [], "message"
    assert answer.status_code == 200, answer.read()
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append((name, line.removeprefix("data: ")))
            name = "message"
    assert found[-1] == ("message", "[DONE]")
    return [(name, json.loads(data)) for name, data in found[:-1]]


def within_a_minute(seconds: float) -> None:
    """Return when this minute of the clock has ``seconds`` left: token rates count by minutes of the clock."""
    left = 60 - time.time() % 60
    if left < seconds:
        time.sleep(left)


def idle(app: FastAPI) -> bool:
    """True if no request holds a place, memory or a slot."""
    engine = engine_of(app)
    load = engine.load()
    held = load["running"] + load["waiting"] + load["scoring"] + load["slots_in_use"]
    reserved = engine.generations.reserved + engine.scores.reserved
    return bool(held + reserved + app.state.traffic.in_flight == 0)


@contextmanager
def process(folder: Path, *settings: str, log: Path) -> Iterator[tuple[Forked, str]]:
    """`ropeway serve` of the model in ``folder`` as another process, and its base URL. ``settings`` are
    NAME=VALUE; the log goes to a file, which never fills up as a pipe does."""
    log.touch()
    running = forked(command, serve_arguments(folder, *settings), log=log, folder=folder)
    with answering(running, log) as url:
        yield running, url


def serve_arguments(folder: Path, *settings: str, port: int = 0) -> list[str]:
    """Arguments of `ropeway`."""
    return ["serve", "--model", str(folder), "--port", str(port), *(f"--set={setting}" for setting in settings)]


@contextmanager
def answering(running: Forked | subprocess.Popen[bytes], log: Path) -> Iterator[str]:
    """Base URL of a server that is starting; it is killed in the end."""
    try:
        wait_for(lambda: "Uvicorn running" in log.read_text() or running.poll() is not None, 180)
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        assert found, log.read_text()
        yield found[0]
    finally:
        running.kill()
        running.wait()


@contextmanager
def serving_sources(tree: Path, model: Path) -> Iterator[str]:
    """Base URL of a server of ``model`` that runs the sources in the folder ``tree``."""
    log = tree / "server.log"
    log.touch()
    arguments = serve_arguments(model, f"database_url=sqlite:///{tree / 'jobs.db'}")
    with answering(forked(ropeway, str(tree), *arguments, log=log, folder=tree), log) as url:
        yield url


def command(arguments: list[str]) -> None:
    """`ropeway`, for a fork."""
    app(arguments)


def signalled(place: str, arguments: list[str]) -> None:
    """`ropeway`, for a fork. Python collects an object as ``place`` is called, and SIGTERM comes in its ``__del__``."""
    module, _, name = place.partition(":")
    *owners, name = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    usual = getattr(owner, name)

    class Collected:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def call(*given: Any, **named: Any) -> Any:
        setattr(owner, name, usual)
        Collected()
        return usual(*given, **named)

    setattr(owner, name, call)
    command(arguments)


def ends(running: Forked, within_s: float) -> int:
    """Exit code of a process that ends within so many seconds, and leaves no child behind."""
    children = psutil.Process(running.pid).children(recursive=True)
    code = running.wait(within_s)
    assert not psutil.wait_procs(children, timeout=1)[1]
    return code
