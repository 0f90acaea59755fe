"""Compressed answers: which are, which are not, and what a cut one looks like."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.middleware.gzip import GZipResponder

from tests.service.serving import serving

TAKES = {"Accept-Encoding": "gzip"}
PLAIN = {"Accept-Encoding": "identity"}


def raw(client: httpx.Client, path: str, headers: dict[str, str]) -> tuple[httpx.Headers, bytes]:
    """Headers and the bytes as they were sent."""
    with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        return answer.headers, b"".join(answer.iter_raw())


@pytest.mark.parametrize("path", ["/methods?full=true", "/methods", "/openapi.json", "/docs/assets/swagger-ui.css"])
def test_text_is_compressed_for_those_who_take_it(client: httpx.Client, path: str) -> None:
    headers, sent = raw(client, path, TAKES)
    own, plain = raw(client, path, PLAIN)
    assert headers["content-encoding"] == "gzip"
    assert headers.get("content-length", str(len(sent))) == str(len(sent))
    assert "content-encoding" not in own
    assert gzip.decompress(sent) == plain
    assert len(sent) < len(plain) / 4
    for found in (headers, own):
        assert "accept-encoding" in found["vary"].lower(), "a cache must not mix them up"


def test_a_result_as_page_and_picture(client: httpx.Client) -> None:
    body = {"input": [5, 6, 7] * 40, "lengths": [16, 32, 64], "methods": ["default", "yarn:4"]}
    links = client.post("/perplexity", json=body).json()["links"]
    page, page_sent = raw(client, links["html"], TAKES)
    assert page["content-encoding"] == "gzip"
    assert "content-security-policy" in page
    assert b"<script" in gzip.decompress(page_sent)
    picture, picture_sent = raw(client, links["png"], TAKES)
    assert "content-encoding" not in picture
    assert picture_sent.startswith(b"\x89PNG")


def test_small_answers_and_refusals_are_not(client: httpx.Client) -> None:
    assert "content-encoding" not in raw(client, "/health/live", TAKES)[0]
    refused = client.post("/generate", json={}, headers=TAKES)
    assert "content-encoding" not in refused.headers
    assert refused.json()["error"]["param"] == "prompt"


def test_event_streams_come_event_by_event(client: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "max_new_tokens": 600, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/generate", json=body, headers=TAKES) as answer:
        assert "content-encoding" not in answer.headers
        chunks = answer.iter_raw()
        assert next(chunks).startswith(b"data: ")
        load = client.get("/health/ready").json()["models"]["tiny"]
        assert load["running"] == 1, "the first event is here while the rest is still being made"


def test_an_answer_in_pieces_and_one_that_is_cut(checkpoints: Path) -> None:
    piece = json.dumps([0.5] * 2000).encode()

    async def pieces(count: int, fails: bool) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield piece
            await asyncio.sleep(0.01)
        if fails:
            raise RuntimeError("broken on purpose")

    async def route(fails: bool) -> Response:
        return StreamingResponse(pieces(5, fails), media_type="application/json")

    with serving(checkpoints) as (url, app), httpx.Client(base_url=url, timeout=30) as client:
        app.add_api_route("/pieces", route)
        headers, sent = raw(client, "/pieces?fails=false", TAKES)
        assert headers["content-encoding"] == "gzip"
        assert gzip.decompress(sent) == piece * 5
        with client.stream("GET", "/pieces?fails=true", headers=TAKES) as cut, pytest.raises(httpx.RemoteProtocolError):
            list(cut.iter_raw())
        assert client.get("/health/live").status_code == 200


def test_large_answers_are_compressed_beside_the_event_loop(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, str] = {}
    compress = GZipResponder._compress_body

    def noted(self: GZipResponder, body: bytes, more_body: bool) -> bytes:
        threads[len(body)] = threading.current_thread().name
        return compress(self, body, more_body)

    async def route(size: int) -> Response:
        return Response(b" " * size, media_type="application/json")

    monkeypatch.setattr(GZipResponder, "_compress_body", noted)
    with serving(checkpoints) as (url, app), httpx.Client(base_url=url, timeout=30) as client:
        app.add_api_route("/blank", route)
        for size in (2000, 5_000_000):
            assert len(client.get("/blank", params={"size": size}, headers=TAKES).content) == size
    assert threads[2000] == "ropeway-server"
    assert threads[5_000_000] != "ropeway-server"
