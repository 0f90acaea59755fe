"""Stores in both databases, and a registry of the tiny models with a runner on it."""

from __future__ import annotations

import gzip
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from service.api.errors import as_api_error
from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import EvaluationResult
from service.evaluation.unit import Plan, evaluate
from service.jobs.runner import JobRunner
from service.jobs.storage.calls import StoreCalls
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from service.sharing.workers import Workers
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


def body(**fields: Any) -> dict[str, Any]:
    """A perplexity request of two documents and three encodings: six units of 64 tokens."""
    methods = [{"method": "default"}, {"method": "linear", "factor": 2.0}, {"method": "dynamic", "factor": 2.0}]
    documents = [[n % 380 + 2 for n in range(start, start + 80)] for start in (0, 7)]
    return {"evaluation": "perplexity", "input": documents, "methods": methods, "lengths": [64]} | fields


@asynccontextmanager
async def running(store: JobStore, models: ModelRegistry, settings: Settings) -> AsyncIterator[JobRunner]:
    """A runner at work."""
    workers, calls = Workers(shared=False), StoreCalls()
    runner = JobRunner(store, models, settings, workers, calls, as_api_error)
    runner.start()
    try:
        yield runner
    finally:
        await runner.close()
        workers.close()
        calls.close()


def result_of(store: JobStore, tenant: str, job_id: str) -> EvaluationResult:
    """The stored result of a job that is done."""
    packed = store.result(tenant, job_id)
    assert packed is not None
    return EVALUATIONS[packed.evaluation].result.model_validate_json(gzip.decompress(packed.data))


def in_one_run(plan: Plan) -> dict[str, Any]:
    """The numbers of an evaluation that nothing interrupts, made on this thread."""
    work = evaluate(plan)
    while True:
        try:
            next(work)
        except StopIteration as stop:
            numbers: dict[str, Any] = stop.value.numbers()
            return numbers
