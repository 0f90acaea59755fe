"""A plan in stages as a job: it grows and goes on after a restart where it was. Its rounds are partial results."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.recommend.results import RecommendResult
from service.evaluation.search.results import SearchResult
from service.evaluation.unit import Plan
from service.jobs.partial_results import partial_result
from service.jobs.planning import planned, request_of
from service.jobs.storage import measured, outcomes
from service.jobs.storage.owner import Owner
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.conftest import TEXT
from tests.service.jobs.adding import queue_of
from tests.service.jobs.bench import in_one_run, result_of, running
from tests.service.serving import until

METHODS = [{"method": "yarn", "factor": factor} for factor in (1.0, 1.5, 2.0, 2.5, 3.0)]
SHARED: dict[str, Any] = {"model": "tiny", "input": TEXT[:9000], "length": 128}
BODIES: dict[str, dict[str, Any]] = {
    "recommend": {**SHARED, "windows": 4, "methods": METHODS},
    "search": {**SHARED, "windows": 1, "held_out": 3, "population": 4, "generations": 4},
}

only_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


def added(store: JobStore, models: ModelRegistry, settings: Settings, name: str = "recommend") -> tuple[str, Plan]:
    request = EVALUATIONS[name].request.model_validate(BODIES[name])
    plan = plan_of(request, models, settings)
    size = {"units": plan.cost.units, "tokens": plan.tokens}
    return store.add("anna", request, models=["tiny"], **size).id, plan


async def until_done(store: JobStore, job_id: str) -> None:
    await until(lambda: store.get("anna", job_id).state not in ("queued", "running"), 60)


@only_sqlite
async def test_a_job_grows_and_equals_the_evaluation(
    store: JobStore, models: ModelRegistry, job_settings: Settings
) -> None:
    job_id, plan = added(store, models, job_settings)
    expected = in_one_run(plan)
    totals = {plan.cost.units}
    async with running(store, models, job_settings), asyncio.timeout(60):
        while (job := store.get("anna", job_id)).state in ("queued", "running"):
            totals.add(job.units_total)
            await asyncio.sleep(0.001)
    assert job.state == "done", job.error
    assert max(totals) == plan.cost.units, "a total is a bound: units are never added to it"
    assert result_of(store, "anna", job_id).numbers() == expected
    assert job.units_done == job.units_total > len(plan.units)
    assert job.tokens_done == job.tokens_total == expected["tokens_read"] <= plan.tokens


@only_sqlite
@pytest.mark.parametrize(("name", "units"), [("recommend", 1), ("search", 5)])
async def test_a_restart_in_any_stage_loses_nothing(
    name: str, units: int, store: JobStore, models: ModelRegistry, job_settings: Settings
) -> None:
    """After every few ``units``."""
    job_id, plan = added(store, models, job_settings, name)
    expected = in_one_run(plan)
    finished: list[Any] = []
    restarts = 0
    while store.get("anna", job_id).state != "done":
        async with running(store, models, job_settings), asyncio.timeout(60):
            more = len(finished) + units
            while len(store.done_units(job_id)) < more and store.get("anna", job_id).state != "done":
                await asyncio.sleep(0.002)
        restarts += 1
        found = store.done_units(job_id)
        assert found[: len(finished)] == finished, "finished units keep their numbers"
        finished = found
    assert restarts > 2
    assert len(finished) > len(plan.units), "it was closed in a later stage too"
    assert result_of(store, "anna", job_id).numbers() == expected
    assert store.get("anna", job_id).units_reused == 0


@only_sqlite
async def test_a_second_job_takes_every_stage_from_the_store(
    store: JobStore, models: ModelRegistry, job_settings: Settings
) -> None:
    first, _ = added(store, models, job_settings)
    async with running(store, models, job_settings) as runner:
        await until_done(store, first)
        second, _ = added(store, models, job_settings)
        runner.notify()
        await until_done(store, second)
    job = store.get("anna", second)
    assert (job.state, job.units_reused, job.seconds) == ("done", job.units_total, 0.0)
    assert result_of(store, "anna", second).numbers() == result_of(store, "anna", first).numbers()


@only_sqlite
async def test_a_stage_that_another_job_has_finished_is_joined(
    store: JobStore, models: ModelRegistry, job_settings: Settings
) -> None:
    """A server joins at the stage of its colleague, although the store leads to the next one."""
    first, _ = added(store, models, job_settings)
    async with running(store, models, job_settings) as runner:
        await until_done(store, first)
        second, plan = added(store, models, job_settings)
        elsewhere = queue_of(store, owner=Owner("elsewhere", 1, 0.0, "planned it"), lease_s=600.0)
        (number,) = elsewhere.waiting("tiny", ()).values()
        claimed = elsewhere.claim(number)
        assert claimed is not None
        by = planned(request_of(claimed.request), "anna", second, models, job_settings)
        elsewhere.begin(number, by.keys, plan.cost)
        elsewhere.enter(number, by.digest, [(at, key, "tiny") for at, key in enumerate(by.keys)])
        runner.notify()
        await until_done(store, second)
    assert result_of(store, "anna", second).numbers() == result_of(store, "anna", first).numbers()


@only_sqlite
@pytest.mark.parametrize(("name", "stages"), [("recommend", "rounds"), ("search", "generations")])
async def test_a_cancelled_job_has_the_result_of_its_finished_stages(
    name: str, stages: str, store: JobStore, models: ModelRegistry, job_settings: Settings
) -> None:
    job_id, plan = added(store, models, job_settings, name)
    async with running(store, models, job_settings), asyncio.timeout(60):
        while len(store.done_units(job_id)) < len(plan.units) + 1:
            await asyncio.sleep(0.001)
        store.cancel("anna", job_id)
    job = measured.read(store.database, "anna", job_id)
    assert job is not None
    result = partial_result(job, models, job_settings, partial(outcomes.read, store.database))
    assert isinstance(result, RecommendResult | SearchResult)
    assert result.partial is not None
    assert result.partial.lacks == [stages], "every candidate was in the first, or is the search's own"
    assert result.partial.units_total > len(plan.units), "the stage that was at work counts"
    ends = {"stop_after": len(result.generations)} if isinstance(result, SearchResult) else {"rounds": 1}
    alone = plan_of(EVALUATIONS[name].request.model_validate(BODIES[name] | ends), models, job_settings)
    result.answer.words[0] = result.answer.words[0].removeprefix(f"By the {stages} that finished: ")
    assert result.numbers() | {"partial": None} == in_one_run(alone)
