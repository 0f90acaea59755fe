"""A database that is locked, damaged, deleted or frozen: job routes say so, and nothing else notices."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from threading import Event

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError
from structlog.testing import CapturingLogger

from service.api import store
from service.jobs.database import calls, opening
from service.jobs.database.calls import PatientCalls, StoreCalls
from service.jobs.database.opening import StoreOutOfReach, StoreUnusable
from service.jobs.storage.pruning import Pruning
from service.jobs.storage.store import JobStore
from tests.service.jobs.adding import add
from tests.service.jobs.postgres import frozen
from tests.service.jobs.test_routes import BODY, ended, submitted
from tests.service.serving import ends, generate, process, serving, wait_for


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "BUSY_S", 0.2)
    monkeypatch.setattr(store, "STORE_S", 1.0)
    monkeypatch.setattr(calls, "LONGEST_RETRY_S", 0.5)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def deleted(path: Path) -> Iterator[None]:
    away = path.with_suffix(".away")
    path.rename(away)
    yield
    away.rename(path)


@contextmanager
def replaced(path: Path) -> Iterator[None]:
    away = path.with_suffix(".away")
    path.rename(away)
    path.write_bytes(away.read_bytes())
    yield
    away.rename(path)


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))
    yield
    path.write_bytes(whole)


@pytest.fixture
def served(checkpoints: Path, tmp_path: Path) -> Iterator[tuple[str, FastAPI, Path]]:
    path = tmp_path / "jobs.db"
    with serving(checkpoints, database_url=f"sqlite:///{path}", resume_jobs=False) as (url, app):
        yield url, app, path


def refused(url: str, job_id: str) -> None:
    """Writes are refused, with the reason in our shape."""
    answer = httpx.post(f"{url}/jobs", json=BODY, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "jobs_out_of_reach"), answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert "SELECT" not in answer.text
    assert httpx.delete(f"{url}/jobs/{job_id}", timeout=30).status_code == 503


@pytest.mark.parametrize("harm", [locked, deleted, replaced])
def test_jobs_are_refused_and_generation_goes_on(
    served: tuple[str, FastAPI, Path], harm: Callable[[Path], AbstractContextManager[None]]
) -> None:
    url, _, path = served
    with httpx.Client(base_url=url, timeout=60) as client:
        job = ended(client, submitted(client)["id"])
        alone = generate(url).json()["results"][0]["token_ids"]
        with harm(path):
            refused(url, job["id"])
            began = time.monotonic()
            assert generate(url).json()["results"][0]["token_ids"] == alone
            assert httpx.get(f"{url}/health/ready").status_code == 200
            assert time.monotonic() - began < 20
        assert client.get(f"/jobs/{job['id']}").json()["state"] == "done"
        assert ended(client, submitted(client, reuse=False)["id"])["state"] == "done"


@pytest.mark.parametrize("harm", [deleted, replaced])
def test_no_connection_is_made_to_another_file(
    tmp_path: Path, harm: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """It would stay with that file, and an empty one has no table."""
    path = tmp_path / "jobs.db"
    store = JobStore(f"sqlite:///{path}")
    store.database.engine.dispose()
    with harm(path), pytest.raises(OperationalError):
        store.database.engine.connect()
    assert store.list("anna") == []
    store.close()


def test_without_its_log_nothing_is_written_and_nothing_lost(tmp_path: Path) -> None:
    """SQLite goes on writing into a deleted log, and all of that is gone at the end of the process."""
    path = tmp_path / "jobs.db"
    store = JobStore(f"sqlite:///{path}")
    kept = add(store)
    path.with_name("jobs.db-wal").unlink()
    with pytest.raises(StoreOutOfReach, match=r"jobs\.db-wal was removed or replaced"):
        add(store)
    with pytest.raises(StoreUnusable, match=r"stop all servers of the file, then remove jobs\.db-shm"):
        JobStore(f"sqlite:///{path}")
    copy = path.with_name("copy.db")  # as after a kill: the end of the process could still write
    copy.write_bytes(path.read_bytes())
    found = JobStore(f"sqlite:///{copy}")
    assert [job.id for job in found.list("anna")] == [kept.id]
    found.close()
    store.close()


def test_a_copy_of_the_file_has_what_was_there_when_it_was_pruned(tmp_path: Path) -> None:
    store = JobStore(f"sqlite:///{tmp_path / 'jobs.db'}")
    kept = add(store)
    Pruning(store.database).prune(2**30, None)
    copy = tmp_path / "copy.db"
    copy.write_bytes((tmp_path / "jobs.db").read_bytes())
    found = JobStore(f"sqlite:///{copy}")
    assert [job.id for job in found.list("anna")] == [kept.id]
    found.close()
    store.close()


def test_a_job_says_that_it_waits_for_the_database_and_goes_on(served: tuple[str, FastAPI, Path]) -> None:
    url, _, path = served
    with httpx.Client(base_url=url, timeout=60) as client:
        wait_for(lambda: client.get("/health/ready").json()["jobs"] == "ok")
        job = submitted(client, reuse=False, methods=[{"method": "yarn", "factor": 1 + n / 8} for n in range(16)])
        with locked(path):  # reads go on, as on a full disk
            wait_for(lambda: client.get(f"/jobs/{job['id']}").json()["stalled"], 60)
            assert client.get("/health/ready").json()["jobs"] == "out_of_reach"
        after = ended(client, job["id"])
        assert (after["state"], after["stalled"]) == ("done", None)
        wait_for(lambda: client.get("/health/ready").json()["jobs"] == "ok")


def test_a_result_is_delivered_where_it_cannot_be_kept(served: tuple[str, FastAPI, Path]) -> None:
    url, _, path = served
    body = {name: value for name, value in BODY.items() if name != "evaluation"}
    with deleted(path):
        answer = httpx.post(f"{url}/perplexity", json=body, timeout=60)
        wait_for(lambda: "ropeway_jobs_out_of_reach 1.0" in httpx.get(f"{url}/metrics").text)
    wait_for(lambda: "ropeway_jobs_out_of_reach 0.0" in httpx.get(f"{url}/metrics").text)
    assert answer.status_code == 200
    assert answer.json()["links"] == {}
    assert len(answer.json()["methods"]) == 2
    kept = httpx.post(f"{url}/perplexity", json=body, timeout=60).json()
    assert httpx.get(f"{url}{kept['links']['csv']}").status_code == 200


def test_damage_is_no_defect_of_ours(served: tuple[str, FastAPI, Path]) -> None:
    url, _, path = served
    with httpx.Client(base_url=url, timeout=60) as client:
        job = ended(client, submitted(client)["id"])
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with damaged(path):
            answers = [client.get("/jobs"), client.get(f"/jobs/{job['id']}"), client.post("/jobs", json=BODY)]
    for answer in answers:
        assert answer.status_code in (200, 503), answer.text
    assert 503 in {answer.status_code for answer in answers}


def test_a_frozen_server_of_postgresql_stops_nothing_else(checkpoints: Path, postgres_url: str) -> None:
    with (
        serving(checkpoints, database_url=postgres_url, resume_jobs=False) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        job = ended(client, submitted(client)["id"])
        with frozen(postgres_url):
            refused(url, job["id"])
            assert generate(url).status_code == 200
            assert httpx.get(f"{url}/health/live").status_code == 200
        assert client.get(f"/jobs/{job['id']}").json()["state"] == "done"


@pytest.mark.slow
def test_sigterm_does_not_wait_for_a_frozen_database(checkpoints: Path, postgres_url: str, tmp_path: Path) -> None:
    server = process(checkpoints / "tiny", f"database_url={postgres_url}", log=tmp_path / "log")
    with server as (running, url), frozen(postgres_url):
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/jobs", timeout=1)
        running.send_signal(signal.SIGTERM)
        assert ends(running, 10) == 0


async def test_a_database_out_of_reach_is_asked_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.02)
    monkeypatch.setattr(calls, "LONGEST_RETRY_S", 0.06)
    monkeypatch.setattr(calls, "log", log := CapturingLogger())
    pool, asked, seen = StoreCalls(), list[float](), list[bool]()
    patient = PatientCalls(pool)

    def ask() -> str:
        asked.append(time.monotonic())
        seen.append(patient.out_of_reach)
        if len(asked) < 5:
            raise StoreOutOfReach("gone")
        return "there"

    assert await patient(ask) == "there"
    pool.close()
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert all(wait > least for wait, least in zip(waits, (0.02, 0.04, 0.06, 0.06), strict=True))
    assert sum(waits) < 1
    assert seen == [False, True, True, True, True]
    assert [call.args for call in log.calls] == [("jobs_out_of_reach",), ("jobs_within_reach",)]
    assert not patient.out_of_reach


async def test_a_call_that_succeeds_says_nothing_of_one_that_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As reads and writes of a full disk."""
    monkeypatch.setattr(calls, "RETRY_S", 0.01)
    monkeypatch.setattr(calls, "log", log := CapturingLogger())
    pool, full = StoreCalls(), Event()
    patient = PatientCalls(pool)

    def write() -> None:
        if not full.is_set():
            raise StoreOutOfReach("the disk is full")

    writes = [asyncio.create_task(patient(write)) for _ in range(3)]
    while not patient.out_of_reach:
        await asyncio.sleep(0.01)
    assert await patient(lambda: "read") == "read"
    assert patient.out_of_reach
    writes[0].cancel()
    await asyncio.wait(writes[:1])
    assert patient.out_of_reach, "two others wait"
    for write_of_the_end in writes[1:]:
        write_of_the_end.cancel()
    await asyncio.wait(writes)
    assert not patient.out_of_reach
    assert [call.args for call in log.calls] == [("jobs_out_of_reach",)], "nothing was written yet"
    last = asyncio.create_task(patient(write))
    while not patient.out_of_reach:
        await asyncio.sleep(0.01)
    full.set()
    await last
    pool.close()
    assert not patient.out_of_reach
    assert [call.args for call in log.calls][1:] == [("jobs_out_of_reach",), ("jobs_within_reach",)]
