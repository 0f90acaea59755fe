"""Stores in both databases, a registry of the tiny models, and a bench of both."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from service.evaluation.perplexity.plan import WindowsUnit
from service.evaluation.unit import Outcome
from service.jobs import execution
from service.jobs.database import calls
from service.jobs.database.opening import Database
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.jobs.bench import Bench
from tests.service.jobs.postgres import postgres_server
from tests.service.serving import SMALL, with_tables


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL with a place for a database's name."""
    with postgres_server() as url:
        yield url


def created(postgres: str, template: str = "template1") -> str:
    """URL of a new PostgreSQL database with the tables of ``template``."""
    name = f"ropeway_{uuid.uuid4().hex}"
    command = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
    with psycopg.connect(postgres.format(name="postgres"), autocommit=True) as connection:
        connection.execute(command)
    return postgres.format(name=name)


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """A PostgreSQL database without tables."""
    return created(postgres)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}"


every_kind = pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])


@every_kind
def new_url(request: pytest.FixtureRequest) -> str:
    """A database of each kind without tables."""
    found: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    assert make_url(found).get_backend_name() == request.param
    return found


@pytest.fixture(scope="session")
def template(postgres: str) -> str:
    """Name of a PostgreSQL database with all tables."""
    url = created(postgres)
    Database(url).close()
    return str(make_url(url).database)


@every_kind
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind with all tables: migrations are most of the time of a small test."""
    if request.param == "sqlite":
        return with_tables(tmp_path / "jobs.db")
    return created(request.getfixturevalue("postgres"), request.getfixturevalue("template"))


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    opened = JobStore(url)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def job_settings(checkpoints: Path) -> Settings:
    own = {"model": str(checkpoints), "score_chunk": 16, "max_scored_tokens": 10_000_000}
    return Settings(_env_file=None, **SMALL | own)


@pytest.fixture(scope="session")
def models(job_settings: Settings) -> Iterator[ModelRegistry]:
    """The tiny model and its variant."""
    registry = ModelRegistry(job_settings)
    yield registry
    registry.close()


@pytest.fixture
def bench(store: JobStore, models: ModelRegistry, job_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(store, models, job_settings)
    run = WindowsUnit.run

    def counted(unit: WindowsUnit) -> Generator[int, None, Outcome]:
        made.started.append((unit.subject.label, unit.name))
        return (yield from run(unit))

    monkeypatch.setattr(WindowsUnit, "run", counted)
    for module in (execution, calls):
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    return made
