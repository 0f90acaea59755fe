"""Limits per key that several servers count in one Redis or Valkey, as separate processes."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from service.api import quotas
from service.api.quotas import TokenRate
from service.app import create_app
from service.settings import Settings
from service.sharing import limits
from service.sharing.limits import Concurrency, LimitsOutOfReach, LimitsUnusable, SharedConcurrency, SharedLimits
from tests.conftest import ROOT
from tests.service.serving import SHORT, serving, wait_for, within_a_minute

GRANTED = """
import asyncio, sys
from service.api import quotas
from service.api.quotas import TokenRate
from service.errors import ApiError
from service.sharing.limits import SharedLimits

async def granted():
    shared = SharedLimits(sys.argv[1])
    rate, tokens = TokenRate(20_000, shared), 0
    await shared.client.incr("begun")
    while int(await shared.client.get("begun")) < 4:
        await asyncio.sleep(0.01)
    try:
        while True:
            await rate.charge(50)
            tokens += 50
    except ApiError as error:
        assert error.code == "token_rate_exceeded", error
    await shared.close()
    print(tokens)

asyncio.run(granted())
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of a new server with nothing in it."""
    pytest.importorskip("redis", reason="the client library of the extra `shared` is not installed")
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _answers(port), 10)
        yield f"redis://127.0.0.1:{port}", running
    finally:
        running.kill()
        running.wait()


@pytest.fixture
def shared_url(store: tuple[str, subprocess.Popen[bytes]]) -> str:
    return store[0]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_four_processes_grant_exactly_one_rate(shared_url: str) -> None:
    within_a_minute(15)
    command = [sys.executable, "-c", GRANTED, shared_url]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    granted = [int(process.communicate(timeout=60)[0]) for process in running]
    assert sum(granted) == 20_000
    assert all(granted), "each of them had a part"


async def test_all_replicas_count_running_requests(shared_url: str) -> None:
    shared = SharedLimits(shared_url)
    replicas = [SharedConcurrency(3, shared, lease_s=16.1) for _ in range(4)]
    places = await asyncio.gather(*(replica.enter("ann") for replica in replicas))
    assert len([place for place in places if place]) == 3
    assert await replicas[0].enter("bob")
    refused = next(replica for replica, place in zip(replicas, places, strict=True) if place is None)
    leaving, place = next((replica, place) for replica, place in zip(replicas, places, strict=True) if place)
    await leaving.leave("ann", place)
    assert await refused.enter("ann")
    assert await refused.enter("ann") is None
    await shared.close()


async def test_places_of_a_lost_replica_expire_and_those_at_work_are_renewed(shared_url: str) -> None:
    shared = SharedLimits(shared_url)
    lost, alive = (SharedConcurrency(2, shared, lease_s=0.6) for _ in range(2))
    assert await lost.enter("ann")
    assert await alive.enter("ann")
    assert lost._renewing is not None
    lost._renewing.cancel()
    assert await alive.enter("ann") is None
    await asyncio.sleep(1.0)
    assert await alive.enter("ann"), "one place is free, the other is still taken"
    assert await alive.enter("ann") is None
    await shared.close()


def test_places_expire_after_the_lease_of_the_settings() -> None:
    pytest.importorskip("redis", reason="the client library of the extra `shared` is not installed")
    app = create_app(Settings(_env_file=None, shared_url="redis://127.0.0.1:1", key_concurrency=2, lease_s=7))
    (concurrency,) = [layer.kwargs["concurrency"] for layer in app.user_middleware if "concurrency" in layer.kwargs]
    assert isinstance(concurrency, SharedConcurrency)
    assert concurrency._lease_s == 7


async def test_a_store_that_was_emptied_learns_the_running_requests_again(shared_url: str) -> None:
    shared = SharedLimits(shared_url)
    working, other = (SharedConcurrency(1, shared, lease_s=0.6) for _ in range(2))
    place = await working.enter("ann")
    assert place
    await shared.client.flushall()
    await asyncio.sleep(0.4)
    assert await other.enter("ann") is None
    await working.leave("ann", place)
    assert await other.enter("ann")
    await shared.close()


async def test_a_request_that_ends_while_it_is_renewed_gives_its_place_back(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RETRY_S", 0.1)
    shared = SharedLimits(shared_url)
    working, other = SharedConcurrency(1, shared, lease_s=30), SharedConcurrency(1, shared, lease_s=30)
    place = await working.enter("ann")
    assert place
    renew = working._renew

    async def late(**arguments: Any) -> None:
        await working.leave("ann", place)
        await renew(**arguments)

    monkeypatch.setattr(working, "_renew", late)
    await working._renewed(place, "ann")
    assert await other.enter("ann") is None, "the store has renewed it"
    await asyncio.sleep(0.3)
    assert await other.enter("ann")
    await shared.close()


async def test_a_store_that_was_frozen_keeps_no_places_of_refused_requests(
    store: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grants them as it wakes up, after the requests have got their 503."""
    for name in ("TIMEOUT_S", "RETRY_S"):
        monkeypatch.setattr(limits, name, 0.2)
    url, server = store
    shared = SharedLimits(url)
    replica = SharedConcurrency(2, shared, lease_s=30)
    place = await replica.enter("ann")
    assert place is not None
    server.send_signal(signal.SIGSTOP)
    for _ in range(3):
        with pytest.raises(LimitsOutOfReach):
            await replica.enter("ann")
    await replica.leave("ann", place)
    server.send_signal(signal.SIGCONT)
    await asyncio.sleep(2.0)
    assert await shared.client.zcard("ropeway/running/ann") == 0
    assert await replica.enter("ann")
    await shared.close()


def test_two_servers_refuse_what_is_too_much_together(checkpoints: Path, shared_url: str) -> None:
    limits = {"shared_url": shared_url, "servers": 2, "key_tokens_per_minute": 40, "api_keys": "ann-key"}
    headers = {"x-api-key": "ann-key"}
    with serving(checkpoints, **limits) as (one, _), serving(checkpoints, **limits) as (other, _):
        answers = [httpx.post(f"{url}/generate", json=SHORT, headers=headers, timeout=60) for url in (one, other) * 2]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[2].json()["error"]["code"] == "token_rate_exceeded"
    assert int(answers[2].headers["retry-after"]) >= 1


async def test_a_store_that_does_not_answer_is_an_error() -> None:
    pytest.importorskip("redis", reason="the client library of the extra `shared` is not installed")
    nowhere = SharedLimits("redis://127.0.0.1:1")
    with pytest.raises(LimitsUnusable, match=r"redis://127.0.0.1:1 does not answer"):
        await nowhere.check()
    with pytest.raises(LimitsOutOfReach):
        await SharedConcurrency(3, nowhere, lease_s=30).enter("ann")
    with pytest.raises(LimitsOutOfReach):
        await TokenRate(5, nowhere).charge(1)
    await TokenRate(5, nowhere).give_back(1, "ann", 0.0)  # the request has its answer all the same


async def test_one_process_counts_for_itself() -> None:
    alone = Concurrency(1)
    place = await alone.enter("ann")
    assert place is not None
    assert await alone.enter("ann") is None
    assert await alone.enter("bob") is not None
    await alone.leave("ann", place)
    assert await alone.enter("ann") is not None


def test_a_url_of_another_store_is_refused() -> None:
    with pytest.raises(LimitsUnusable, match="redis, rediss, valkey, valkeys"):
        SharedLimits("memcached://localhost")


@pytest.mark.parametrize("limit", ["key_concurrency", "key_tokens_per_minute"])
def test_servers_with_limits_need_a_shared_store(limit: str) -> None:
    fields = {"servers": 2, limit: 5}
    with pytest.raises(ValidationError, match="need ROPEWAY_SHARED_URL"):
        Settings(_env_file=None, **fields)
    Settings(_env_file=None, shared_url="redis://localhost", **fields)
    Settings(_env_file=None, servers=2)


async def test_tokens_come_back_in_the_shared_store(shared_url: str) -> None:
    shared = SharedLimits(shared_url)
    one, other = (TokenRate(100, shared) for _ in range(2))
    await one.charge(90)
    assert await other.left(0) == 10
    await other.give_back(60, "anonymous", 0.0)
    assert await one.left(0) == 70
    await other.give_back(31, "anonymous", 0.0)
    assert await one.left(0) == 70, "more than the minute has was charged before"
    await one.give_back(20, "anonymous", 61.0)
    assert await one.left(0) == 70, "those of an earlier minute stay"
    assert await one.left(65) == 10, "a tenth of the minute at least"
    assert await one.left(97) == 3, "no more than a whole minute has"
    await shared.close()


async def test_tokens_come_back_once_the_store_answers(
    store: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(quotas, "RETRY_S", 0.2)
    url, server = store
    shared = SharedLimits(url)
    rate = TokenRate(100, shared)
    await rate.charge(90)
    server.send_signal(signal.SIGSTOP)
    await rate.give_back(60, "anonymous", 0.0)
    await asyncio.sleep(1.0)
    server.send_signal(signal.SIGCONT)
    await asyncio.sleep(2.0)
    assert await rate.left(0) == 70
    await shared.close()


@pytest.mark.parametrize("outages", [1, 3])
async def test_tokens_come_back_after_an_outage(outages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "RETRY_S", 0.0)
    rate = TokenRate(100)
    storage: Any = rate._limiter.storage
    look = storage.get_sliding_window
    left = [OSError("out of reach")] * outages

    async def late(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return await look(*arguments)

    await rate.charge(90)
    monkeypatch.setattr(storage, "get_sliding_window", late)
    await rate.give_back(60, "anonymous", 0.0)
    assert len(left) == outages - 1
    await asyncio.gather(*quotas._giving)
    assert await rate.left(0) == 70


async def test_tokens_that_may_have_come_back_do_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = TokenRate(100)
    hit = rate._limiter.hit

    async def without_an_answer(*arguments: Any, **options: Any) -> bool:
        await hit(*arguments, **options)
        raise OSError("no answer")

    await rate.charge(90)
    monkeypatch.setattr(rate._limiter, "hit", without_an_answer)
    await rate.give_back(30, "anonymous", 0.0)
    assert not quotas._giving
    assert await rate.left(0) == 40
