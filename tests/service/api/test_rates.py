"""Tokens that evaluations and jobs take from the minute of a key, and give back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from sqlalchemy import update

from service.api.quotas import RATE_HEADERS, Reserved, TokenRate
from service.jobs.database.tables import Job
from service.jobs.storage.refusals import TooManyJobs
from tests.service.conftest import TEXT
from tests.service.serving import engine_of, idle, serving, wait_for, within_a_minute

TOKENS = 600
"""Tokens that ``BODY`` reads: all but the last one."""

BODY: dict[str, Any] = {"input": [[5] * (TOKENS + 1)], "methods": ["default"], "lengths": [TOKENS + 1]}

JOB: dict[str, Any] = BODY | {"evaluation": "perplexity", "reuse": False}

LONG: dict[str, Any] = {"input": TEXT, "methods": ["default"], "protocol": "sliding", "stride": 10, "lengths": [64]}
"""Hundreds of windows: seconds of work."""


class Key:
    """The key of a server with so many tokens a minute."""

    def __init__(self, url: str, app: FastAPI) -> None:
        self.url, self.app, self._looks = url, app, 0

    def used(self) -> int:
        """Tokens that it has used, without those of these looks."""
        answer = httpx.post(f"{self.url}/generate", json={"prompt": [5], "max_new_tokens": 1, "ignore_eos": True})
        self._looks += 1
        limit, remaining = (int(answer.headers[name]) for name in RATE_HEADERS[:2])
        return limit - remaining - 2 * self._looks

    def submit(self, key: str = "once") -> httpx.Response:
        return httpx.post(f"{self.url}/jobs", json=JOB, headers={"Idempotency-Key": key}, timeout=60)

    @contextmanager
    def nothing_is_read(self) -> Iterator[None]:
        """Inside, evaluations wait for memory."""
        scores = engine_of(self.app).scores
        (held,) = scores.enter([scores.capacity])
        try:
            yield
        finally:
            held.leave()


@contextmanager
def key_with(checkpoints: Path, tokens: int) -> Iterator[Key]:
    with serving(checkpoints, key_tokens_per_minute=tokens) as (url, app):
        within_a_minute(15)
        yield Key(url, app)


def test_submissions_at_once_under_one_key_count_once(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with key_with(checkpoints, 4 * TOKENS + 100) as key:
        store = key.app.state.jobs
        add = store.add

        def slowly(*args: Any, **options: Any) -> Any:
            time.sleep(0.5)  # all have looked for the job by then
            return add(*args, **options)

        monkeypatch.setattr(store, "add", slowly)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: key.submit(), range(6)))
        assert [answer.status_code for answer in answers] == [202] * 6
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert answers[0].json()["tokens_total"] == TOKENS
        assert key.used() == TOKENS


@pytest.mark.parametrize("tokens", [3 * TOKENS, TOKENS + 100])
def test_a_job_that_another_server_made_meanwhile_counts_once(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    with key_with(checkpoints, tokens) as key:
        made, store = key.submit(), key.app.state.jobs
        before, submitted = [None], store.submitted
        monkeypatch.setattr(store, "submitted", lambda *args: before.pop() if before else submitted(*args))
        again = key.submit()
        assert (again.status_code, again.json()["id"]) == (202, made.json()["id"])
        assert again.headers[RATE_HEADERS[1]] == str(tokens - TOKENS)
        assert key.used() == TOKENS


def test_a_job_that_is_refused_in_the_end_gives_its_tokens_back(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise TooManyJobs(1)

    with key_with(checkpoints, 100 * TOKENS) as key, key.nothing_is_read():
        monkeypatch.setattr(key.app.state.jobs, "add", refused)
        refusal = key.submit()
        assert (refusal.status_code, refusal.headers[RATE_HEADERS[1]]) == (429, str(100 * TOKENS))
        assert key.used() == 0


def test_a_cancelled_job_gives_back_the_tokens_that_it_did_not_read(checkpoints: Path) -> None:
    """However long ago it was made: those of its last submission or resumption count."""
    with key_with(checkpoints, 100 * TOKENS) as key, key.nothing_is_read():
        job = f"{key.url}/jobs/{key.submit().json()['id']}"
        assert key.used() == TOKENS
        with key.app.state.jobs.database.writing() as session:
            session.execute(update(Job).values(created_at=datetime.now(UTC) - timedelta(hours=1)))
        for _ in range(2):
            assert httpx.delete(job).json()["tokens_done"] == 0
            assert httpx.delete(job).json()["state"] == "cancelled", "again gives nothing back"
            assert key.used() == 0
            assert httpx.post(f"{job}/resume").status_code == 202
            assert key.used() == TOKENS
        httpx.delete(job)


def test_a_job_is_resumed_once_by_requests_at_once(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with key_with(checkpoints, 100 * TOKENS) as key, key.nothing_is_read():
        job, store = f"{key.url}/jobs/{key.submit().json()['id']}", key.app.state.jobs
        httpx.delete(job)
        resume = store.resume

        def slowly(*args: Any) -> Any:
            time.sleep(0.5)  # all have seen that it ended by then
            return resume(*args)

        monkeypatch.setattr(store, "resume", slowly)
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda _: httpx.post(f"{job}/resume"), range(3)))
        assert [answer.status_code for answer in answers] == [202] * 3
        assert key.used() == TOKENS
        httpx.delete(job)


@pytest.mark.parametrize("tokens", [3 * TOKENS, TOKENS + 100, TOKENS])
def test_a_job_that_another_server_resumed_meanwhile_is_no_refusal(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    with key_with(checkpoints, tokens) as key, key.nothing_is_read():
        made, store = key.submit().json()["id"], key.app.state.jobs
        httpx.delete(f"{key.url}/jobs/{made}")
        get, before = store.get, [store.get("anonymous", made)]
        assert httpx.post(f"{key.url}/jobs/{made}/resume").status_code == 202
        monkeypatch.setattr(store, "get", lambda *args, **options: before.pop() if before else get(*args, **options))
        again = httpx.post(f"{key.url}/jobs/{made}/resume")
        assert again.status_code == 202, again.text
        assert again.json()["request"]["lengths"] == JOB["lengths"]
        assert not before


@pytest.mark.parametrize("leaves", [True, False])
async def test_tokens_come_back_from_a_slow_store_behind_the_answer(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do where the client has left meanwhile, too."""
    answers, given = asyncio.Event(), asyncio.Event()

    async def give_back(*_: Any) -> None:
        await answers.wait()
        given.set()

    rate = TokenRate(1000, None)
    monkeypatch.setattr(rate, "give_back", give_back)
    reserved = Reserved(cast(Request, SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(token_rate=rate)))))
    await reserved.charge(0, 300)
    settling = asyncio.create_task(reserved.settle())
    await asyncio.sleep(0)
    if leaves:
        settling.cancel()
    await asyncio.wait([settling], timeout=10)
    assert settling.done()
    assert settling.cancelled() == leaves
    assert not given.is_set()
    answers.set()
    await asyncio.wait_for(given.wait(), 10)


def test_an_evaluation_counts_what_it_reads(checkpoints: Path) -> None:
    with key_with(checkpoints, 2_000_000) as key:
        assert httpx.post(f"{key.url}/perplexity", json=BODY, timeout=60).status_code == 200
        assert key.used() == TOKENS, "all of it"
        with key.nothing_is_read():
            late = httpx.post(f"{key.url}/perplexity", json=BODY | {"timeout_s": 0.5}, timeout=60)
        assert late.status_code == 504
        wait_for(lambda: key.used() == TOKENS)
        with httpx.stream("POST", f"{key.url}/perplexity", json=LONG | {"stream": True}, timeout=60) as answer:
            told = next(line for line in answer.iter_lines() if line.startswith("data: "))
        progress = json.loads(told.removeprefix("data: "))
        wait_for(lambda: idle(key.app))
        wait_for(lambda: progress["tokens_done"] <= key.used() - TOKENS < progress["tokens_total"])
