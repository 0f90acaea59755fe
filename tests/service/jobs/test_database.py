"""A database is opened when it is ours, whole and writable; any other is refused and stays as it was."""

from __future__ import annotations

import gzip
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.database.opening import VERSION_TABLE, Database, StoreUnusable, _config, default_url
from service.jobs.database.tables import VERSION, Base
from service.jobs.storage.listed import LISTED_REQUEST, listed
from service.jobs.storage.refusals import TooManyJobBytes
from service.jobs.storage.store import JobStore
from service.jobs.storage.terms import Terms
from tests.conftest import ROOT as REPOSITORY
from tests.forks.process import forked
from tests.service.jobs import server
from tests.service.jobs.bench import body
from tests.service.serving import with_tables
from tests.service.unprivileged import unprivileged


def test_migrations_make_exactly_the_tables(new_url: str) -> None:
    database = Database(new_url)
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    database.close()
    Database(new_url).close()  # a second opening finds them


OPENED = """
import sys
from service.jobs.database.opening import Database
for url in sys.argv[1:]:
    Database(url).close()
    print("alembic" in sys.modules)
"""


def test_a_database_of_today_is_opened_without_alembic(sqlite_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENED, with_tables(tmp_path / "today.db"), sqlite_url]
    loaded = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["False", "True"]


def test_the_version_of_today_is_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(_config()).get_current_head() == VERSION


def test_jobs_of_the_first_version_are_kept(url: str) -> None:
    store = JobStore(url)
    request = PerplexityRequest.model_validate(body())
    kept = store.add("anna", request, models=["tiny"], units=6, tokens=384)
    with store.database.engine.begin() as connection:
        connection.execute(text("DROP INDEX jobs_by_idempotency_key"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN idempotency_key"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN request_bytes"))
        connection.execute(text("ALTER TABLE jobs ADD COLUMN result TEXT"))
        connection.execute(text("UPDATE jobs SET state = 'done', result = :result"), {"result": '{"x": [0.1]}'})
        connection.execute(text("DROP TABLE results"))
        connection.execute(text("DROP TABLE policies"))
        connection.execute(text("DROP TABLE unfinished_units"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN plan"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN setup"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN listed"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN queued_at"))
        connection.execute(text("DROP TABLE servers"))
        connection.execute(text("DROP TABLE products"))
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0001'"))
    store.close()
    migrated = JobStore(url)
    assert migrated.get("anna", kept.id).request == kept.request
    found = migrated.result("anna", kept.id)
    assert found is not None
    assert gzip.decompress(found.data) == b'{"x": [0.1]}'
    with pytest.raises(TooManyJobBytes):
        migrated.check_room("anna", Terms(most_bytes=100))
    again = migrated.add("anna", request, models=["tiny"], units=6, tokens=384, terms=Terms(idempotency_key="a"))
    assert [job.id for job in migrated.list("anna")] == [again.id, kept.id]
    migrated.close()


def test_long_requests_of_former_versions_are_listed_without_their_documents(url: str) -> None:
    store = JobStore(url)
    request = PerplexityRequest.model_validate(body() | {"input": "a" * (LISTED_REQUEST + 1)})
    store.add("anna", request, models=["tiny"], units=6, tokens=384)
    (shown,) = store.list("anna")
    with store.database.engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET listed = NULL"))
        connection.execute(text("ALTER TABLE jobs DROP COLUMN queued_at"))
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0008'"))
    store.close()
    migrated = JobStore(url)
    (again,) = migrated.list("anna")
    assert again.request == shown.request != {}
    assert "input" not in again.request
    migrated.close()


def test_listings_have_the_names_of_long_documents_where_these_fit() -> None:
    long = {"evaluation": "perplexity", "input": ["a" * LISTED_REQUEST] * 2}
    assert listed(long | {"names": ["one", "two"]}) == {"evaluation": "perplexity", "names": ["one", "two"]}
    assert listed(long | {"names": ["n" * 255] * 100}) == {"evaluation": "perplexity"}


def test_sqlite_is_durable_and_keeps_references(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.reading() as session:
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        found = [session.scalar(text(f"PRAGMA {name}")) for name in pragmas]
    database.close()
    assert found == ["wal", 2, 1, 5000]


def test_several_processes_open_a_new_database_at_once(new_url: str, tmp_path: Path) -> None:
    logs = [tmp_path / f"log{n}" for n in range(3)]
    running = [forked(server.open_database, new_url, log=log) for log in logs]
    for process, log in zip(running, logs, strict=True):
        assert process.wait(60) == 0, log.read_text()


def newer(path: Path) -> None:
    JobStore(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.commit()


def lacking(path: Path) -> None:
    JobStore(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE outcomes DROP COLUMN checksum")
        connection.commit()


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE jobs (id INTEGER)")
        connection.commit()


def damaged(path: Path) -> None:
    JobStore(f"sqlite:///{path}").close()
    contents = bytearray(path.read_bytes())
    contents[4096 : 3 * 4096] = os.urandom(2 * 4096)
    path.write_bytes(contents)


def cut(path: Path) -> None:
    JobStore(f"sqlite:///{path}").close()
    path.write_bytes(path.read_bytes()[:5000])


CASES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(b"notes of last summer\n" * 400), "not a database"),
    (lambda path: path.write_bytes(b"short"), "not a database"),
    (foreign, "another program"),
    (newer, "version 9999 is unknown: a newer ropeway"),
    (lacking, "table outcomes lacks checksum"),
    (damaged, "damaged|malformed"),
    (cut, "damaged|malformed"),
]


@pytest.mark.parametrize(("make", "why"), CASES, ids=["text", "short", "foreign", "newer", "lacking", "damaged", "cut"])
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(
    tmp_path: Path, make: Callable[[Path], object], why: str
) -> None:
    path = tmp_path / "jobs.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreUnusable, match=why) as refused:
        JobStore(f"sqlite:///{path}")
    assert str(path) in str(refused.value)
    assert "ROPEWAY_DATABASE_URL" in str(refused.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0, stat.S_IRUSR], ids=["unreadable", "read-only"])
def test_a_file_without_the_right_to_it_is_refused(mode: int) -> None:
    with unprivileged() as folder:
        path = folder / "jobs.db"
        JobStore(f"sqlite:///{path}").close()
        before = path.read_bytes()
        path.chmod(mode)
        with pytest.raises(StoreUnusable, match=r"readonly|unable to open"):
            JobStore(f"sqlite:///{path}")
        path.chmod(0o600)
        assert path.read_bytes() == before


def test_a_folder_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match="it is a folder: name a file in it"):
        JobStore(f"sqlite:///{tmp_path}")
    with pytest.raises(StoreUnusable, match="does not exist"):
        JobStore(f"sqlite:///{tmp_path / 'nowhere' / 'jobs.db'}")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite://", "must name a file"),
        ("sqlite:///:memory:", "must name a file"),
        ("mysql://anna:tulip@localhost/jobs", "only sqlite"),
        ("nonsense tulip", "not a database URL"),
        ("postgresql://anna:tulip@localhost:bad/jobs", "its port is no number"),
        ("postgresql://anna:tulip@127.0.0.1:9/jobs?password=tulip", "refused"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_its_password(url: str, why: str) -> None:
    with pytest.raises(StoreUnusable, match=why) as refused:
        JobStore(url)
    assert "tulip" not in str(refused.value)


def test_a_foreign_or_newer_postgresql_database_is_refused(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE jobs (id INTEGER)")
    with pytest.raises(StoreUnusable, match="another program"):
        JobStore(postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE jobs")
    JobStore(postgres_url).close()
    with psycopg.connect(postgres_url) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(StoreUnusable, match="a newer ropeway"):
        JobStore(postgres_url)


def test_a_readonly_postgresql_database_is_refused(postgres_url: str) -> None:
    with pytest.raises(StoreUnusable, match="read-only"):
        JobStore(f"{postgres_url}&options=-c%20default_transaction_read_only%3Don")


def test_the_default_is_a_file_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))  # where there is no XDG
    found = Path(default_url().removeprefix("sqlite:///"))
    assert found.name == "ropeway.db"
    assert found.is_relative_to(tmp_path)
    JobStore(default_url()).close()
    assert found.exists()


def test_a_default_folder_that_cannot_be_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path / "data"))
    with pytest.raises(StoreUnusable, match="cannot be made"):
        default_url()
