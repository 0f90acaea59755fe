"""Connections: many idle ones block no client, half a head does not stay, an unread answer frees its socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import CapturingLogger

from service.api import errors
from service.api.http import connections
from service.api.http.scope import RequestScope
from service.errors import ClientTooSlow
from tests.service.serving import process, serving, token_ids, wait_for

LONG = "/long"
"""Sent in pieces, and larger than all buffers on its way."""


def add_long(app: FastAPI) -> None:
    @app.get(LONG)
    async def long() -> StreamingResponse:
        return StreamingResponse(iter([bytes(1 << 20)] * 32))

    app.router.routes.insert(0, app.router.routes.pop())


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.fixture
def few(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FastAPI]]:
    """A server of eight connections, which waits a second for a head."""
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    with serving(checkpoints, max_connections=8, send_timeout_s=1.0) as server:
        yield server


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_idle_connections_keep_nobody_out(few: tuple[str, FastAPI]) -> None:
    url, _ = few
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address(url))) for _ in range(40)]
        assert token_ids(url)
        assert is_closed(idle[0])
        assert token_ids(url)


def test_connections_that_work_are_not_closed_for_new_ones(few: tuple[str, FastAPI]) -> None:
    url, _ = few
    body = {"prompt": [5, 6, 7], "max_new_tokens": 200, "stream": True}
    with ExitStack() as stack:
        streams = [stack.enter_context(httpx.stream("POST", f"{url}/generate", json=body)) for _ in range(6)]
        for _ in range(20):
            stack.enter_context(socket.create_connection(address(url)))
        for stream in streams:
            assert stream.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["unread", "body"])
def test_connections_that_stand_still_keep_nobody_out(
    kind: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that nobody reads, and bodies that do not come: with these, a client without a key locked all out."""
    monkeypatch.setattr(connections, "STILL_S", 0.2)
    heads = {
        "unread": f"GET {LONG} HTTP/1.1\r\nHost: x\r\n\r\n",
        "body": "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    }
    with serving(checkpoints, max_connections=8, send_timeout_s=60) as (url, app), ExitStack() as stack:
        add_long(app)
        for _ in range(8):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(address(url))
            connection.sendall(heads[kind].encode())
        wait_for(lambda: app.state.traffic.in_flight == 8)
        wait_for(lambda: answers(url), 20)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("sent", [b"", b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_head_that_does_not_come_is_given_up(few: tuple[str, FastAPI], sent: bytes) -> None:
    with socket.create_connection(address(few[0])) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        assert is_closed(connection)
        assert time.monotonic() - began > 0.5


def test_a_body_that_does_not_come_is_told_so(few: tuple[str, FastAPI]) -> None:
    with socket.create_connection(address(few[0])) as connection:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        connection.sendall(head.encode())
        connection.settimeout(10)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
    assert answer.startswith("HTTP/1.1 408 ")
    assert '"code":"request_timeout"' in answer


@contextmanager
def unread(url: str, path: str) -> Iterator[socket.socket]:
    """A client that asks and never reads."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect(address(url))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        yield connection


def test_an_answer_that_nobody_reads_frees_its_socket(
    few: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, app = few
    add_long(app)
    port = address(url)[1]

    def open_sockets() -> int:
        return sum(c.laddr and c.laddr.port == port and c.status == "ESTABLISHED" for c in here.net_connections())

    here = psutil.Process()
    log = CapturingLogger()
    monkeypatch.setattr(errors, "log", log)
    with unread(url, LONG):
        wait_for(lambda: open_sockets() == 1)
        wait_for(lambda: open_sockets() == 0, 20)
    wait_for(lambda: app.state.traffic.in_flight == 0)
    assert log.calls == [], "a slow reader is no fault of the server"
    assert httpx.get(f"{url}/metrics").text.count('reason="client_too_slow"} 1.0') == 1


def test_a_slow_reader_is_no_fault_of_the_server() -> None:
    error = errors.as_api_error(ClientTooSlow("nothing was read for 1 seconds"))
    assert (error.status, error.code) == (499, "client_too_slow")


async def test_a_slow_reader_is_cut_without_an_exception(few: tuple[str, FastAPI]) -> None:
    """The library logs an exception with its traceback."""
    state = few[1].state

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientTooSlow("nothing was read")

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError("there is nobody")

    outer = RequestScope(slow, state.settings, state.metrics, state.traffic)
    await outer({"type": "http", "method": "GET", "path": LONG, "headers": []}, gone, send)


@pytest.mark.slow
def test_a_flood_of_connections_fills_neither_descriptors_nor_the_log(checkpoints: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = ("cache_tokens=1024", f"database_url=sqlite:///{tmp_path / 'jobs.db'}", "max_connections=200")
    with process(checkpoints / "tiny", *settings, log=log) as (running, url), ExitStack() as stack:
        before = log.stat().st_size
        for _ in range(900):
            stack.enter_context(socket.create_connection(address(url), timeout=10))
        assert token_ids(url)
        assert psutil.Process(running.pid).num_fds() < 200 + connections.BACKLOG + 100
        assert log.stat().st_size - before < 100_000
