"""Clients that leave, read slowly, never read, or send garbage: no other client notices."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.conftest import TEXT
from tests.service.serving import LONG, SHORT, engine_of, idle, serving, token_ids, wait_for


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints, send_timeout_s=1.0) as server:
        yield server


@pytest.mark.slow
async def test_two_hundred_clients_vanish_after_their_first_token(served: tuple[str, FastAPI]) -> None:
    url, app = served
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": LONG, "max_new_tokens": 500, "stream": True})
    request = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    before = token_ids(url)

    async def vanish() -> bool:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((request + body).encode())
        await reader.readuntil(b"token_ids")
        await asyncio.sleep(0.01)
        writer.transport.abort()
        return True

    for _ in range(10):
        assert all(await asyncio.gather(*(vanish() for _ in range(20))))
    await asyncio.to_thread(wait_for, lambda: idle(app))
    assert await asyncio.to_thread(token_ids, url) == before
    assert engine_of(app).thread.restarts == 0


PADDING = "x" * (16 << 20)
"""More than the buffers between server and client hold."""


def test_a_client_that_reads_slowly_keeps_nobody_waiting_and_loses_nothing(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(checkpoints, send_timeout_s=30) as (url, app):
        expected = token_ids(url, max_new_tokens=40)
        padding = iter([PADDING])
        model = app.state.models.default
        monkeypatch.setattr(model.patch, "describe", lambda *_: {"padding": next(padding, "")})
        with _stream_without_reading(url, max_new_tokens=40) as connection:
            wait_for(lambda: engine_of(app).generations.reserved)
            wait_for(lambda: engine_of(app).generations.reserved == 0 and engine_of(app).load()["running"] == 0)
            assert token_ids(url, max_new_tokens=40) == expected
            assert app.state.traffic.in_flight >= 1
            received = bytearray()
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                received += connection.recv(1 << 18)
        text = received.decode()
        assert text.count("x" * 1000) >= 1000
        assert [
            t for ids in re.findall(r'"token_ids": ?\[([\d, ]+)\]', text) for t in json.loads(f"[{ids}]")
        ] == expected


def test_a_client_that_never_reads_is_cut_off(served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch) -> None:
    url, app = served
    served_model = app.state.models.default
    monkeypatch.setattr(served_model.patch, "describe", lambda *_: {"padding": PADDING})
    with _stream_without_reading(url, max_new_tokens=2) as connection:
        wait_for(lambda: app.state.traffic.in_flight == 1)
        wait_for(lambda: idle(app))
        connection.settimeout(10)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))  # ends because the server closed it
        assert b"[DONE]" not in received


@contextmanager
def _stream_without_reading(url: str, **body: Any) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(SHORT | body | {"stream": True})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)  # below a segment, it would trickle
        connection.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        connection.sendall(f"{head}\r\n\r\n{content}".encode())
        yield connection


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nothing",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"prompt": "a", "max_new_tokens": 1e400}',
        b'{"prompt": "a", "max_new_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800", "max_new_tokens": 2}',
        b'{"prompt": "a", "pe": ' + b'{"method": ' * 500 + b"}" * 501,
        b'{"prompt": [' + b"true," * 9999 + b"true]}",
        b'{"' + b"k" * 100_000 + b'": 1}',
    ],
    ids=range(11),
)
def test_malformed_bodies_get_a_small_400(served: tuple[str, FastAPI], content: bytes) -> None:
    for path in ("/generate", "/perplexity"):
        answer = httpx.post(f"{served[0]}{path}", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.content) < 5000


def test_oversized_bodies_never_get_inside(checkpoints: Path) -> None:
    with serving(checkpoints, max_prompt_bytes=1000) as (url, _):
        large = json.dumps(SHORT | {"prompt": TEXT[:2000]}).encode()
        for content in (large, (large[n : n + 100] for n in range(0, len(large), 100))):
            answer = httpx.post(f"{url}/generate", content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers["x-request-id"]


def test_malformed_http_is_answered_in_plain_text(served: tuple[str, FastAPI]) -> None:
    """As docs/serving.md says: no route of ours is reached."""
    host, port = served[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n")
        head = connection.makefile("rb").read().lower()
    assert head.startswith(b"http/1.1 400 ")
    assert b"content-type: text/plain" in head
    assert b"x-request-id" not in head


def test_a_body_that_never_ends_is_given_up_with_its_client(served: tuple[str, FastAPI]) -> None:
    url, app = served
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        wait_for(lambda: app.state.traffic.in_flight == 1)
    wait_for(lambda: idle(app))


def test_wrong_routes_and_methods_are_refused_in_shape(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    for method, path, status in (("GET", "/generate", 405), ("POST", "/nowhere", 404), ("PATCH", "/health", 405)):
        answer = httpx.request(method, f"{url}{path}")
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/generate", "POST, PUT"),
        ("HEAD", "/generate", "POST, PUT"),
        ("OPTIONS", "/jobs", "GET, HEAD, POST"),
        ("POST", "/jobs/x", "GET, HEAD, DELETE"),
        ("PUT", "/policies/tiny", "GET, HEAD, DELETE"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/docs/assets/swagger-ui.css", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_all_that_the_path_takes(
    served: tuple[str, FastAPI], method: str, path: str, allowed: str
) -> None:
    answer = httpx.request(method, f"{served[0]}{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
