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
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.jobs.bench import Bench
from tests.service.jobs.postgres import postgres_server
from tests.service.serving import SMALL


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL with a place for a database's name."""
    with postgres_server() as url:
        yield url


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """An empty PostgreSQL database."""
    name = f"ropeway_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.format(name="postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return postgres.format(name=name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind."""
    found: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    assert make_url(found).get_backend_name() == request.param
    return found


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    opened = JobStore(url)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def job_settings(checkpoints: Path) -> Settings:
    own = {"model": str(checkpoints), "score_chunk": 16, "max_scored_tokens": 10_000_000}
    return Settings(_env_file=None, **SMALL | own)


@pytest.fixture(scope="module")
def models(job_settings: Settings) -> Iterator[ModelRegistry]:
    """The tiny model and its variant, served for one module."""
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
