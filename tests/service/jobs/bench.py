"""A runner on a store and the tiny models, and what the tests of jobs ask of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from service.api.errors import as_api_error
from service.evaluation.catalogue import plan_of, result_in
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.results import EvaluationResult
from service.evaluation.unit import Plan, evaluate
from service.jobs.database.calls import StoreCalls
from service.jobs.records import JobInfo
from service.jobs.runner import JobRunner
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from service.sharing.workers import Workers
from tests.service.evaluation.prompting import finish
from tests.service.serving import until

LONG: dict[str, Any] = {"input": [[n % 380 + 2 for n in range(2000)]], "lengths": [2000]}
"""Units of some 150 chunks."""


def body(**fields: Any) -> dict[str, Any]:
    """A perplexity request of two documents and three encodings: six units of 64 tokens."""
    methods = [{"method": "default"}, {"method": "linear", "factor": 2.0}, {"method": "dynamic", "factor": 2.0}]
    documents = [[n % 380 + 2 for n in range(start, start + 80)] for start in (0, 7)]
    return {"evaluation": "perplexity", "input": documents, "methods": methods, "lengths": [64]} | fields


@asynccontextmanager
async def running(
    store: JobStore,
    models: ModelRegistry,
    settings: Settings,
    tenants: Callable[[], Collection[str] | None] = lambda: None,
) -> AsyncIterator[JobRunner]:
    """A runner at work."""
    workers, calls = Workers(shared=False), StoreCalls()
    runner = JobRunner(store, models, settings, workers, calls, as_api_error, tenants)
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
    return result_in(packed.data, packed.evaluation)


def in_one_run(plan: Plan) -> dict[str, Any]:
    """The numbers of an evaluation that nothing interrupts, made on this thread."""
    numbers: dict[str, Any] = finish(evaluate(plan)).numbers()
    return numbers


class Bench:
    """A store, the models and what was measured on them, unit by unit."""

    def __init__(self, store: JobStore, models: ModelRegistry, settings: Settings) -> None:
        self.store, self.models, self.settings = store, models, settings
        self.started: list[tuple[str, str]] = []

    def plan(self, **fields: Any) -> Plan:
        return plan_of(PerplexityRequest.model_validate(body(**fields)), self.models, self.settings)

    def add(self, tenant: str = "anna", **fields: Any) -> str:
        plan, request = self.plan(**fields), PerplexityRequest.model_validate(body(**fields))
        names = [unit.subject.model for unit in plan.units]
        return self.store.add(tenant, request, models=names, units=len(plan.units), tokens=plan.tokens).id

    @asynccontextmanager
    async def running(
        self, store: JobStore | None = None, keys: Collection[str] | None = None, **settings: Any
    ) -> AsyncIterator[JobRunner]:
        """A runner at work, for the tenants in ``keys`` at each moment."""
        chosen = self.settings.model_copy(update=settings)
        async with running(store or self.store, self.models, chosen, lambda: keys) as runner:
            yield runner

    async def ended(self, *ids: str, tenant: str = "anna") -> list[JobInfo]:
        await until(lambda: all(self.store.get(tenant, i).state not in ("queued", "running") for i in ids))
        return [self.store.get(tenant, i) for i in ids]

    def numbers(self, job_id: str, tenant: str = "anna") -> dict[str, Any]:
        result = result_of(self.store, tenant, job_id)
        assert (result.id, result.seconds) == (job_id, None)
        return result.numbers()

    def expected(self, **fields: Any) -> dict[str, Any]:
        """Of the same evaluation on this thread, without a job."""
        return in_one_run(self.plan(**fields))


only_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
