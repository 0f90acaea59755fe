"""The middleware in Serve's proxy, around small ASGI applications in the place of Serve; and the keys of requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.scale.private_names import AFFINITY_HEADER
from service.scale.proxy import metrics
from service.scale.proxy.affinity import READ_BYTES, affinity_key
from service.scale.proxy.middleware import Front


def serve_like(status: int | None, *parts: bytes, ours: bool, kind: bytes = b"application/json") -> ASGIApp:
    """An application that answers with ``status`` and all parts, and then ends without the end of the body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if status is None:
            return
        marked = [(b"x-content-type-options", b"nosniff")] if ours else []
        ids = [(b"x-request-id", b"one"), (b"x-request-id", b"two")]
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *marked, *ids]}
        )
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not kind.startswith(b"text/event"):
            await send({"type": "http.response.body"})

    return app


async def post(app: ASGIApp, path: str = "/generate", **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(Front(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, **options)


class TestAnswers:
    @pytest.mark.parametrize(
        ("app", "code"),
        [
            (serve_like(None, ours=False), "replica_lost"),
            (serve_like(500, b"Internal Server Error", ours=False, kind=b"text/plain"), "replica_lost"),
            (serve_like(503, b"unavailable", ours=False, kind=b"text/plain"), "no_replica"),
            (serve_like(404, b"Path '/' not found.", ours=False, kind=b"text/plain"), "no_replica"),
        ],
    )
    async def test_failures_of_serve_get_the_shape_of_the_service(self, app: ASGIApp, code: str) -> None:
        answer = await post(app, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("1", "application/json")
        assert len(answer.headers.get_list("x-request-id")) == 1

    async def test_nobody_waits_for_a_replica_once_all_are_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def waits(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(metrics, "known", frozenset())
        async with asyncio.timeout(5):
            answer = await post(waits, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["retry-after"] == "1"

    @pytest.mark.parametrize("status", [200, 400, 413, 429, 500, 503])
    async def test_answers_of_replicas_pass_as_they_are(self, status: int) -> None:
        answer = await post(serve_like(status, b"{", b"}", ours=True), headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.content) == (status, b"{}")
        assert answer.headers.get_list("x-request-id") == ["mine"]

    async def test_a_stream_without_its_end_gets_an_error_event(self) -> None:
        answer = await post(serve_like(200, b"data: 1\n\n", ours=True, kind=b"text/event-stream; charset=utf-8"))
        first, error, done, _ = answer.text.split("\n\n")
        assert (first, done) == ("data: 1", "data: [DONE]")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"

    async def test_failures_of_messages_have_the_form_of_their_api(self) -> None:
        lost = serve_like(200, b"data: 1\n\n", ours=True, kind=b"text/event-stream")
        last = (await post(lost, "/v1/messages")).text.split("\n\n", 1)[1]
        name, data = last.strip().split("\n")
        assert (name, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "overloaded_error")
        refused = await post(serve_like(None, ours=False), "/v1/messages", json={})
        assert (refused.json()["type"], refused.json()["error"]["code"]) == ("error", "replica_lost")
        assert refused.json()["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
        for sent, kind in (({}, "server_error"), ({"anthropic-version": "2023-06-01"}, "overloaded_error")):
            refused = await post(serve_like(None, ours=False), "/v1/models", headers=sent)
            assert refused.json()["error"]["type"] == kind

    async def test_probes_of_serve_are_left_alone(self) -> None:
        answer = await post(serve_like(200, b"success", ours=False, kind=b"text/plain"), "/-/healthz")
        assert answer.text == "success"


class TestMetrics:
    async def get(self, app: ASGIApp) -> httpx.Response:
        transport = httpx.ASGITransport(Front(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/metrics")

    async def test_each_replica_is_asked_and_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "known", frozenset({"a", "b", "gone", "hangs"}))
        monkeypatch.setattr(metrics, "READ_S", 0.2)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            replica = Headers(scope=scope)[AFFINITY_HEADER].removeprefix(metrics.REPLICA)
            if replica == "hangs":
                await asyncio.Event().wait()
            registry = CollectorRegistry()
            Counter("x", "A counter.", ["of"], registry=registry).labels("all").inc({"a": 1, "b": 2}[replica])
            Histogram("y", "A histogram.", registry=registry, buckets=(1,)).observe(0.5)
            await serve_like(200, generate_latest(registry), ours=True)(scope, receive, send)

        answer = await self.get(app)
        assert answer.headers["content-type"] == metrics.TYPE
        assert 'x_total{of="all",replica="a"} 1.0\nx_total{of="all",replica="b"} 2.0\n' in answer.text
        assert answer.text.count("# TYPE x_total counter") == 1
        assert answer.text.count('y_bucket{le="1.0",replica="') == 2

    async def test_without_metrics_the_answer_is_that_of_a_replica(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "known", frozenset({"a"}))
        assert (await self.get(serve_like(404, b"{}", ours=True))).status_code == 404
        monkeypatch.setattr(metrics, "known", frozenset())
        assert (await self.get(serve_like(503, ours=False))).json()["error"]["code"] == "no_replica"


async def received(**options: Any) -> tuple[dict[str, str], bytes]:
    """Headers and body that reach the replica."""
    found: list[tuple[dict[str, str], bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        found.append(({name.decode(): value.decode() for name, value in scope["headers"]}, body))

    await post(app, **options)
    return found[0]


class TestRequests:
    async def test_the_whole_body_reaches_the_replica_with_a_key(self) -> None:
        content = json.dumps({"prompt": "ab" * READ_BYTES, "max_new_tokens": 1}).encode()
        parts = [content[start : start + 1000] for start in range(0, len(content), 1000)]

        async def chunks() -> Any:
            for part in parts:
                yield part

        headers, body = await received(content=chunks())
        assert body == content
        assert len(headers[AFFINITY_HEADER]) == 24

    @pytest.mark.parametrize("name", [AFFINITY_HEADER, AFFINITY_HEADER.replace("-", "_"), "x-request-timeout-seconds"])
    async def test_clients_do_not_steer_serve(self, name: str) -> None:
        headers, _ = await received(path="/health", headers={name: "1"})
        assert name not in headers

    @pytest.mark.parametrize("given", ["", "two words", "x" * 129])
    async def test_a_bad_request_id_is_replaced(self, given: str) -> None:
        headers, _ = await received(headers={"x-request-id": given})
        assert len(headers["x-request-id"]) == 32

    async def test_keys_differ_by_tenant(self) -> None:
        keys = [(await received(json={"prompt": "a"}, headers={"x-api-key": key}))[0][AFFINITY_HEADER] for key in "aab"]
        assert keys[0] == keys[1] != keys[2]


def key(**body: Any) -> str | None:
    return affinity_key(json.dumps(body).encode(), "tenant")


class TestAffinityKey:
    def test_the_start_of_the_prompt_decides(self) -> None:
        same = "a" * 300
        assert key(prompt=same + "b") == key(prompt=same + "c") != key(prompt="b" + same)
        assert key(prompt=[*range(70), 1]) == key(prompt=[*range(70), 2]) != key(prompt=[1, *range(70)])
        assert key(prompt=[same, "b"]) == key(prompt=same)
        assert key(messages=[{"role": "user", "content": same + "b"}]) == key(
            messages=[{"role": "user", "content": same + "c"}]
        )

    def test_instructions_and_the_start_of_the_input_decide(self) -> None:
        turns = [{"role": "user", "content": "a"}]
        assert key(system="Be short.", messages=turns) != key(messages=turns)
        one = key(instructions="Be short.", input="a" * 300 + "b")
        assert one == key(instructions="Be short.", input="a" * 300 + "c")
        others = [key(input="a" * 300), key(instructions="Be long.", input="a" * 300), key(input=[{"role": "user"}])]
        assert len({one, *others}) == 4

    def test_other_prefixes_in_the_cache_are_other_keys(self) -> None:
        bodies = [{}, {"cache_salt": "s"}, {"model": "m"}, {"pe": "yarn:4"}, {"pe": {"method": "yarn", "factor": 4}}]
        assert len({key(prompt="a", **body) for body in bodies}) == len(bodies)

    @pytest.mark.parametrize("head", [b"", b"{", b"[1]", b'{"prompt": 3}', b'{"prompt": []}', b"\xff\xfe", b'"a"'])
    def test_there_is_none_without_a_prompt(self, head: bytes) -> None:
        assert affinity_key(head, "tenant") is None

    def test_a_cut_body_has_the_key_of_the_whole_one(self) -> None:
        whole = json.dumps({"model": "m", "pe": "yarn:4", "prompt": "word " * 1000}).encode()
        assert affinity_key(whole[:2000], "tenant") == affinity_key(whole, "tenant")
