"""HEAD: the answer of GET without its body, on every path that has GET."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from service.api.http.heads import HeadAsGet
from tests.service.api.conftest import ANN
from tests.service.serving import events_of, wait_for

PROBES = ("/health/live", "/health/ready", "/health", "/v1/health")
PATHS = ("/ui/", "/ui/app.js", "/ui", "/v1/models", "/models", "/methods", "/methods/yarn", "/jobs", "/openapi.json")
OTHERS = ("/docs", "/nowhere", "/methods/yarm", "/models?x=1", "/generate", "/methods/linear/frequencies.png?factor=4")
OF_ONE_ANSWER = ("date", "x-request-id")


@pytest.mark.parametrize("path", [*PROBES, *PATHS, *OTHERS])
def test_it_has_the_status_and_the_headers_of_get(client: httpx.Client, path: str) -> None:
    answer, same = client.head(path), client.get(path)
    assert (answer.status_code, answer.content) == (same.status_code, b"")
    heads, wanted = ({k: v for k, v in a.headers.items() if k not in OF_ONE_ANSWER} for a in (answer, same))
    assert heads == wanted
    assert client.get("/health").status_code == 200, "the connection goes on"


def test_it_needs_a_key_where_get_does(guarded: tuple[str, FastAPI, Path]) -> None:
    url = guarded[0]
    assert [httpx.head(f"{url}/models", headers=headers).status_code for headers in ({}, ANN)] == [401, 200]
    asks = {"Access-Control-Request-Method": "HEAD", "Access-Control-Request-Headers": "authorization"}
    assert httpx.options(f"{url}/models", headers={"Origin": "https://a.example", **asks}).status_code == 200


def test_events_of_a_job_stream_on_beside_it(guarded: tuple[str, FastAPI, Path]) -> None:
    url, app, _ = guarded
    with httpx.Client(base_url=url, headers=ANN, timeout=60) as client:
        job = client.post("/jobs", json={"evaluation": "perplexity", "input": [5, 6, 7] * 8, "lengths": [8]}).json()
        path = f"/jobs/{job['id']}/events"
        answer = client.head(path)
        assert answer.headers["content-type"].startswith("text/event-stream")
        with client.stream("GET", path) as stream:
            assert events_of(stream)[-1][0] == "job"
    wait_for(lambda: app.state.traffic.in_flight == 0)


async def test_it_ends_a_stream_that_has_no_end() -> None:
    ended = asyncio.Event()

    async def lines() -> AsyncIterator[str]:
        try:
            while True:
                yield "line\n"
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    app = FastAPI()
    app.add_middleware(HeadAsGet)
    app.add_api_route("/lines", lambda: StreamingResponse(lines()))
    async with asyncio.timeout(5), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
        answer = await client.head("/lines")
    assert (answer.status_code, answer.content, ended.is_set()) == (200, b"", True)
