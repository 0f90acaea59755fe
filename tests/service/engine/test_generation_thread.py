"""A generation thread that dies or stalls is replaced, and probes report it."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.engine.adapter import EncodingManager
from service.engine.limits import EngineLimits
from tests.service.engine.generating import finished
from tests.service.engine.test_engine import running
from tests.service.serving import SHORT, engine_of, events, generate, idle, serving, token_ids, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints) as server:
        yield server


@pytest.fixture(scope="module")
def stalling(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints, stall_timeout_s=1.5) as server:
        yield server


def hold_steps(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread stays in its next step until the event is set."""
    release = threading.Event()
    manager: Any = engine_of(app).thread.manager
    monkeypatch.setattr(manager, "_generation_step", lambda: release.wait(30))
    return release


def test_a_thread_that_stalls_under_requests_is_replaced(
    stalling: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, app = stalling
    before, restarts = token_ids(url), engine_of(app).thread.restarts
    stuck = engine_of(app).thread.manager
    release = hold_steps(app, monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        streaming = pool.submit(events, url, **SHORT)
        answer = generate(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert "retry-after" in answer.headers
        assert streaming.result()[-1][1]["error"]["code"] == "engine_failed"
    assert token_ids(url) == before
    assert engine_of(app).thread.restarts == restarts + 1
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(rf'ropeway_engine_restarts_total{{model_name="tiny"}} {restarts + 1}\.0', metrics)
    release.set()
    wait_for(lambda: not stuck.is_running())  # it ends by itself, and touches nothing
    assert token_ids(url) == before
    wait_for(lambda: idle(app))


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/health/ready"])
def test_probes_tell_of_a_thread_that_stalls_and_replace_it(
    stalling: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    url, app = stalling
    engine, release = engine_of(app), threading.Event()
    lost, restarts = engine.thread.manager, engine.thread.restarts
    monkeypatch.setattr(lost.interleaved, "tenants", lambda: release.wait(30) and set())
    refused: list[httpx.Response] = []

    def refuses() -> bool:
        refused.append(httpx.get(f"{url}{path}"))
        return refused[-1].status_code == 503

    wait_for(refuses)
    assert refused[-1].json()["error"]["code"] == "not_ready"
    assert "retry-after" in refused[-1].headers
    assert engine.thread.restarts == restarts + 1
    for probe in ("/health", "/health/ready", "/health/live"):
        assert httpx.get(f"{url}{probe}").status_code == 200
    assert engine.thread.restarts == restarts + 1
    release.set()
    wait_for(lambda: not lost.is_running())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", [SystemExit, ArithmeticError])
def test_a_thread_that_dies_is_replaced_with_a_clean_cache(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    url, app = served
    prompt = [(7 * n) % 380 + 2 for n in range(200)]
    before = token_ids(url, prompt=prompt)
    engine = engine_of(app)
    lost, restarts = engine.thread.manager, engine.thread.restarts

    def dies() -> None:
        raise end("killed")

    assert isinstance(lost, EncodingManager)
    assert lost.batch_processor is not None
    cache, kept, ordinary = weakref.ref(lost.batch_processor.cache), list[bool](), EncodingManager.start

    def starting(self: EncodingManager) -> None:
        kept.append(cache() is not None)
        ordinary(self)

    monkeypatch.setattr(EncodingManager, "start", starting)
    monkeypatch.setattr(lost, "_generation_step", dies)
    assert generate(url, prompt=prompt).json()["error"]["code"] == "engine_failed"
    wait_for(lambda: httpx.get(f"{url}/health/ready").status_code == 200 and engine.thread.manager is not lost)
    assert engine.thread.restarts == restarts + 1
    assert engine.load()["cache_tokens_used"] == 0
    assert token_ids(url, prompt=prompt) == before
    if end is not SystemExit:  # pytest keeps the traceback of that one
        assert kept == [False], "a card has no room for two caches"


async def test_scoring_in_a_stalled_step_fails_too(checkpoints: Path) -> None:
    release = threading.Event()

    def stuck() -> Iterator[int]:
        release.wait(20)
        yield 1

    limits = EngineLimits(2048, 1024, stall_timeout_s=1.0)
    async with running(checkpoints, limits) as engine:
        await finished(engine, [2], 1)
        with pytest.raises(RuntimeError, match="in one step"):
            await engine.score(stuck(), 10, lambda _: None, scored={})  # type: ignore[arg-type]
        assert len((await finished(engine, [2, 3], 4)).token_ids) == 4
        assert engine.thread.restarts == 1
        release.set()


def test_several_may_stop_it_at_once(checkpoints: Path) -> None:
    """The end of a replica and the end of its application may come together."""
    with serving(checkpoints) as (_, app):
        thread = engine_of(app).thread
        both = threading.Barrier(16)

        def stop(_: int) -> None:
            both.wait()
            thread.stop(0.1)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(stop, range(16)))
        assert not thread.manager.is_running()
