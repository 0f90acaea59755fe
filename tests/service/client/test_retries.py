"""Requests sent again: after a refusal injected before the live server answers, and failed connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tenacity import RetryCallState, Retrying
from tenacity.wait import wait_none

from service.client import AsyncRopeway, Ropeway, RopewayError, retries
from service.client.retries import LONGEST_WAIT_S
from tests.service.serving import serving

Failure = httpx.Response | type[httpx.TransportError]


class Injected(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Gives the prepared failures, one per request, then passes requests on to the server."""

    def __init__(self, *failures: Failure) -> None:
        self.failures, self.sent = list(failures), 0
        self._live, self._async_live = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._failure(request) or self._live.handle_request(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self._failure(request) or await self._async_live.handle_async_request(request)

    def close(self) -> None:
        self._live.close()

    async def aclose(self) -> None:
        await self._async_live.aclose()

    def _failure(self, request: httpx.Request) -> httpx.Response | None:
        self.sent += 1
        if not self.failures:
            return None
        failure = self.failures.pop(0)
        if isinstance(failure, httpx.Response):
            return failure
        raise failure("injected", request=request)


def refused(status: int, **headers: str) -> httpx.Response:
    error = {"message": "injected", "type": "t", "param": None, "code": f"code_{status}"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=names, json={"error": error})


back_off = retries._backoff


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_backoff", wait_none())


@pytest.mark.parametrize(("attempt", "shortest"), [(1, 0.5), (2, 1.0), (3, 2.0), (9, 8.0)])
def test_the_back_off_doubles_up_to_a_limit(attempt: int, shortest: float) -> None:
    state = RetryCallState(Retrying(), None, (), {})
    state.attempt_number = attempt
    waits = [back_off(state) for _ in range(50)]
    assert shortest <= min(waits) < max(waits) <= shortest + 0.5


CALLS: dict[str, Callable[[Ropeway], Any]] = {
    "generate": lambda client: client.generate("The", max_new_tokens=2).results[0].finish_reason,
    "stream": lambda client: list(client.stream("The", max_new_tokens=2)),
    "perplexity": lambda client: client.perplexity([5, 6, 7] * 9, lengths=[16]).methods[0].lengths[0].perplexity,
    "models": lambda client: client.models(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_transient_refusal_is_waited_out(server: str, call: str) -> None:
    transport = Injected(refused(429, Retry_After="0"), refused(503, Retry_After="0"))
    with Ropeway(server, transport=transport) as client:
        assert CALLS[call](client)
    assert transport.sent == 3


@pytest.mark.parametrize("failure", [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError])
def test_a_connection_that_fails_is_made_again(server: str, failure: type[httpx.TransportError]) -> None:
    transport = Injected(failure)
    with Ropeway(server, transport=transport) as client:
        assert CALLS["stream"](client)
    assert transport.sent == 2


@pytest.mark.parametrize(
    ("failure", "sends"),
    [
        (refused(503), 2),
        (refused(500), 1),
        (refused(500, x_should_retry="true"), 2),
        (refused(503, x_should_retry="false"), 1),
        (refused(504, x_should_retry="false"), 1),
        (refused(507), 1),
        (refused(429, Retry_After=str(LONGEST_WAIT_S + 1)), 1),
        (refused(400), 1),
        (httpx.ReadTimeout, 1),
    ],
    ids=str,
)
def test_what_is_sent_again_and_what_is_not(server: str, failure: Failure, sends: int) -> None:
    transport = Injected(failure)
    with Ropeway(server, transport=transport) as client:
        if sends == 1:
            with pytest.raises(RopewayError, match="injected"):
                client.models()
        else:
            assert client.models()
    assert transport.sent == sends


async def test_the_same_for_asyncio(server: str) -> None:
    transport = Injected(refused(429, Retry_After="0"), httpx.ConnectError)
    async with AsyncRopeway(server, transport=transport) as client:
        assert (await client.generate("The", max_new_tokens=2)).results[0].usage.completion_tokens <= 2
        transport.failures = [refused(503)]
        assert [event async for event in client.stream("The", max_new_tokens=2)]
        transport.failures = [refused(400)]
        with pytest.raises(RopewayError, match="injected"):
            await client.models()
    assert transport.sent == 3 + 2 + 1


def test_the_last_failure_is_raised_as_it_is(server: str) -> None:
    transport = Injected(*[refused(503, Retry_After="0", x_request_id=f"r{n}") for n in range(9)])
    with Ropeway(server, max_retries=1, transport=transport) as client, pytest.raises(RopewayError) as caught:
        client.models()
    assert (caught.value.status, caught.value.code, caught.value.request_id) == (503, "code_503", "r1")
    assert (caught.value.retry_after, transport.sent) == (0, 2)


def test_probing_is_not_tried_again(server: str) -> None:
    transport = Injected(refused(503))
    with Ropeway(server, transport=transport) as client, pytest.raises(RopewayError):
        client.health()
    assert transport.sent == 1


@pytest.mark.parametrize(("sent", "shortest", "longest"), [("1.5", 1.5, 1.5), ("date", 50, 60)])
def test_the_server_says_how_long_to_wait(
    server: str, monkeypatch: pytest.MonkeyPatch, sent: str, shortest: float, longest: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("tenacity.nap.time", SimpleNamespace(sleep=waits.append))
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    transport = Injected(refused(429, Retry_After=date if sent == "date" else sent))
    with Ropeway(server, transport=transport) as client:
        client.models()
    assert len(waits) == 1
    assert shortest <= waits[0] <= longest


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("-1", 0.0), ("", None), ("soon", None)])
def test_retry_after_in_the_error(text: str, seconds: float | None) -> None:
    assert RopewayError("m", headers={"retry-after": text}).retry_after == seconds


@pytest.fixture
def narrow(checkpoints: Path) -> Iterator[str]:
    with serving(checkpoints, key_concurrency=1) as (url, _):
        yield url


def test_a_real_429_is_waited_out(narrow: str) -> None:
    with Ropeway(narrow) as holder, Ropeway(narrow, max_retries=8) as client:
        running = holder.stream([5, 6, 7], max_new_tokens=1500)
        next(running)
        with Ropeway(narrow, max_retries=0) as hasty, pytest.raises(RopewayError) as caught:
            hasty.models()
        assert (caught.value.status, caught.value.code, caught.value.transient) == (429, "too_many_requests", True)
        assert caught.value.retry_after == 1
        threading.Timer(0.3, running.close).start()
        assert client.models()
