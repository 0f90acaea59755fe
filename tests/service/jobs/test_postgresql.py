"""PostgreSQL's locks and connections: no server waits for ever for another, or for an answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from sqlalchemy import select, text

from service.jobs.database import opening, postgresql
from service.jobs.database.opening import Database, NotStorable, StoreOutOfReach
from service.jobs.database.tables import Job
from service.jobs.storage.store import JobStore
from tests.service.jobs.adding import add
from tests.service.jobs.postgres import frozen, silent
from tests.service.serving import wait_for


def test_a_server_that_stops_within_a_transaction_loses_its_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "BUSY_S", 0.2)
    monkeypatch.setattr(postgresql, "IDLE_S", 1.0)
    stopped, other = JobStore(postgres_url), JobStore(postgres_url)
    job = add(stopped)

    def cancelled() -> bool:
        with suppress(StoreOutOfReach):
            return other.cancel("anna", job.id).state == "cancelled"
        return False

    def stop() -> None:
        with stopped.database.writing() as session:
            session.execute(select(Job).with_for_update())
            with pytest.raises(StoreOutOfReach, match=r"canceling statement due to lock timeout$"):
                other.cancel("anna", job.id)
            wait_for(cancelled, 10)
            session.execute(select(Job))

    with pytest.raises(StoreOutOfReach, match="idle-in-transaction"):
        stop()
    assert stopped.get("anna", job.id).state == "cancelled", "it goes on with another connection"
    stopped.close()
    other.close()


def test_a_nul_is_no_value_for_it(postgres_url: str) -> None:
    store = JobStore(postgres_url)
    with pytest.raises(NotStorable, match=r"^the database does not take a value: .*NUL"):
        add(store, "an\0na")
    store.close()


def test_a_migration_of_another_process_is_waited_for(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "BUSY_S", 0.1)
    migrating = Database(postgres_url)
    with ThreadPoolExecutor(1) as pool:
        with migrating.writing() as session:
            session.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": opening.LOCK})
            waiting = pool.submit(Database, postgres_url)
            time.sleep(0.5)
            assert not waiting.done()
        waiting.result(30).close()
    migrating.close()


def test_a_database_that_falls_silent_is_out_of_reach(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "SILENT_S", 0.5)
    store = JobStore(postgres_url)
    asked = text("SELECT 1")

    def ask() -> None:
        with store.database.reading() as session:
            session.execute(asked)
            with frozen(postgres_url):
                pool.submit(session.execute, asked).result(10)

    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreOutOfReach, match=r"no answer within 0\.5 seconds"):
        ask()
    assert store.list("anna") == []
    store.close()


def test_a_connection_that_falls_silent_is_replaced(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "SILENT_S", 0.5)
    store = JobStore(postgres_url)
    job = add(store)
    with ThreadPoolExecutor(1) as pool, silent(postgres_url):
        assert pool.submit(store.get, "anna", job.id).result(10).id == job.id
    store.close()


def test_parameters_of_the_url_win(postgres_url: str) -> None:
    opened = Database(f"{postgres_url}&options=-c%20lock_timeout%3D7s&keepalives_idle=77&connect_timeout=8")
    with opened.reading() as session:
        names = ("lock_timeout", "idle_in_transaction_session_timeout")
        shown = [session.scalar(text(f"SHOW {name}")) for name in names]
        connection = session.connection().connection.dbapi_connection
        assert isinstance(connection, postgresql.Answered)
        parameters = connection.info.get_parameters()
    opened.close()
    assert shown == ["7s", f"{postgresql.IDLE_S:g}s"]
    assert (parameters["keepalives_idle"], parameters["connect_timeout"]) == ("77", "8")
