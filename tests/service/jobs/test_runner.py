"""Jobs are done: in turn, once, resumed to the bit, and without disturbing anybody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import case, select, update
from structlog.testing import CapturingLogger

from patches import parse
from service.engine.request import SamplingParams
from service.evaluation.perplexity.plan import WindowsUnit
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.unit import Outcome
from service.jobs import runner
from service.jobs.database.opening import StoreOutOfReach
from service.jobs.database.tables import Job, StoredOutcome, UnfinishedUnit
from service.jobs.signals import within
from service.jobs.storage.claims import Recorded, Taken
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.store import JobStore
from service.jobs.storage.units import Finished
from tests.service.jobs.bench import LONG, Bench, body, only_sqlite
from tests.service.serving import until


async def test_a_job_gives_what_the_evaluation_gives(bench: Bench) -> None:
    expected = bench.expected()
    bench.started.clear()
    job_id = bench.add()
    async with bench.running():
        (job,) = await bench.ended(job_id)
    assert bench.numbers(job_id) == expected
    assert (job.state, job.units_done, job.units_total, job.units_reused) == ("done", 6, 6, 0)
    assert job.tokens_done == job.tokens_total == bench.plan().tokens
    assert job.seconds > 0
    assert job.started_at is not None
    assert job.finished_at is not None
    done = bench.store.done_units(job_id)
    assert [unit.number for unit in done] == list(range(1, 7))
    assert [(unit.label, unit.name) for unit in done] == bench.started
    assert all(set(unit.summary) == {"nll_mean"} for unit in done)


async def test_the_second_job_computes_nothing_unless_it_asks_to(bench: Bench) -> None:
    expected = bench.expected()
    async with bench.running() as runner:
        first = bench.add()
        runner.notify()
        await bench.ended(first)
        bench.started.clear()
        again, part = bench.add(), bench.add(methods=[{"method": "linear", "factor": 2.0}])
        runner.notify()
        jobs = await bench.ended(again, part)
        assert [(job.units_done, job.units_reused, job.seconds) for job in jobs] == [(6, 6, 0.0), (2, 2, 0.0)]
        assert bench.started == []
        assert bench.numbers(again) == expected
        afresh, others = bench.add(reuse=False), bench.add("berta")
        runner.notify()
        (job,) = await bench.ended(afresh)
        (other,) = await bench.ended(others, tenant="berta")
    assert (job.units_reused, other.units_reused, len(bench.started)) == (0, 0, 12)
    assert bench.numbers(afresh) == bench.numbers(others, "berta") == expected


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_closed_runner_loses_nothing(bench: Bench, reuse: bool) -> None:
    fields = {"reuse": reuse, "lengths": [40, 64]}
    expected = bench.expected(**fields)
    bench.started.clear()
    job_id = bench.add(**fields)
    finished: list[Any] = []
    closed = 0
    while bench.store.get("anna", job_id).state != "done":
        async with bench.running():
            before = len(finished)
            await until(
                lambda: (
                    len(bench.store.done_units(job_id)) > before  # noqa: B023 - called in this round
                    or bench.store.get("anna", job_id).state == "done"
                )
            )
        closed += 1
        found = bench.store.done_units(job_id)
        assert found[: len(finished)] == finished
        finished = found
    assert closed > 2
    assert bench.numbers(job_id) == expected
    assert set(Counter((u.label, u.name, u.length) for u in finished).values()) == {1}
    assert len(bench.started) <= len(finished) + closed  # only units at work were begun again


@only_sqlite
async def test_cancelling_ends_the_unit_at_work_and_nothing_else(bench: Bench) -> None:
    engine = bench.models.default.engine
    job_id, other = bench.add(**LONG), bench.add("berta")
    async with bench.running() as runner:
        await until(lambda: runner.progress(job_id) > 0)
        assert bench.store.get("anna", job_id).tokens_done > 0
        assert bench.store.cancel("anna", job_id).state == "cancelled"
        runner.notify()
        await until(lambda: runner.progress(job_id) == 0 and engine.scores.reserved == 0, 5)
        (job,) = await bench.ended(other, tenant="berta")
    assert job.state == "done"
    assert bench.store.get("anna", job_id).state == "cancelled"
    await until(lambda: engine.patch.slots.in_use() == 0)


@only_sqlite
async def test_tenants_take_turns_and_each_has_its_oldest_job_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whose = {}
    for n, tenant in enumerate(["anna", "anna", "berta", "clara", "anna"]):
        job = bench.add(tenant, input=[list(range(2 + n, 90 + n))])  # 3 units each
        with bench.store.database.reading() as session:
            number = session.scalar(select(Job.number).where(Job.id == job))
        whose[number] = f"{tenant}{n}"
    order, record = [], JobQueue.record

    def noted(queue: JobQueue, number: int, units: list[Finished]) -> Recorded:
        order.extend([whose[number]] * len(units))
        return record(queue, number, units)

    monkeypatch.setattr(JobQueue, "record", noted)
    async with bench.running() as runner:
        most = 0
        while any(bench.store.list(name, state="queued") for name in ("anna", "berta", "clara")):
            most = max(most, len(runner._jobs.active))
            await asyncio.sleep(0.002)
        await until(lambda: len(order) == 15)
    turns = ["anna0", "berta2", "clara3"] * 3
    assert order == [*turns, *["anna1"] * 3, *["anna4"] * 3]
    assert most <= 3  # a plan for each tenant at most, not for each job


@only_sqlite
async def test_generation_is_answered_while_a_long_unit_runs(bench: Bench) -> None:
    engine, job_id = bench.models.default.engine, bench.add(**LONG)
    async with bench.running() as runner:
        await until(lambda: runner.progress(job_id) > 0)
        finished = len(bench.store.done_units(job_id))
        sampling = SamplingParams(temperature=0.0)
        resolved = engine.patch.resolve(parse({"method": "default"}), 11)
        async for generation in engine.generate([2, 3, 4], resolved, sampling, 8, pe_method="default"):
            tokens = len(generation.token_ids)
        assert tokens == 8
        assert len(bench.store.done_units(job_id)) == finished
        assert bench.store.get("anna", job_id).state == "running"


@only_sqlite
async def test_progress_is_told_and_counted_in(bench: Bench) -> None:
    job_id = bench.add(methods=[{"method": "default"}], **LONG)
    async with bench.running() as runner:
        seen = []
        while bench.store.get("anna", job_id).state != "done":
            await within(runner.next_change(), 10)
            seen.append(bench.store.get("anna", job_id).tokens_done)
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert seen[-1] == bench.store.get("anna", job_id).tokens_total
    assert bench.store.in_flight == {}


@only_sqlite
async def test_a_job_of_one_long_unit_has_its_seconds_and_an_estimate(bench: Bench) -> None:
    """They were 0 and null until the unit ended."""
    job_id = bench.add(methods=[{"method": "default"}], **LONG)
    async with bench.running() as runner:
        seen = []
        while (job := bench.store.get("anna", job_id)).state != "done":
            seen.append(job)
            await within(runner.next_change(), 10)
    assert job.units_total == 1
    at_work = [before for before in seen if before.tokens_done and not before.units_done]
    assert len(at_work) > 10
    assert all(before.seconds > 0 for before in at_work)
    assert [before.seconds for before in at_work] == sorted(before.seconds for before in at_work)
    for before in at_work:
        assert before.seconds_left is not None
        left = (before.tokens_total - before.tokens_done) / before.tokens_done
        assert before.seconds_left == pytest.approx(before.seconds * left)


@only_sqlite
async def test_a_variants_units_run_on_its_own_engine(bench: Bench) -> None:
    fields = {"methods": [{"method": "default"}, {"method": "alibi"}]}
    expected = bench.expected(**fields)
    job_id = bench.add(**fields)
    async with bench.running():
        await bench.ended(job_id)
    assert {method["model"] for method in expected["methods"]} == {"tiny", "tiny-alibi"}
    assert bench.numbers(job_id) == expected


async def test_two_processes_do_every_unit_once(bench: Bench, url: str) -> None:
    ids = [bench.add("anna", input=[list(range(2 + n, 90 + n))]) for n in range(4)]
    ids += [bench.add("anna", input=[list(range(9 + n, 97 + n))]) for n in range(4)]
    other = JobStore(url)
    async with bench.running(), bench.running(other):
        jobs = await bench.ended(*ids)
    other.close()
    assert {job.state for job in jobs} == {"done"}
    assert len(bench.started) == sum(job.units_total for job in jobs) == 24


@only_sqlite
async def test_units_of_a_claim_whose_answer_was_lost_are_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    take, lost = JobQueue.take, list[Taken]()

    def lose(queue: JobQueue, number: int, model: str, most: int, *, again: bool = False) -> Taken | None:
        taken = take(queue, number, model, most, again=again)
        if taken is not None and len(lost) < 2:
            lost.append(taken)
            raise StoreOutOfReach("no answer")
        return taken

    monkeypatch.setattr(JobQueue, "take", lose)
    job = bench.add()
    async with bench.running():
        (done,) = await bench.ended(job)
    assert (done.state, done.units_done, len(lost)) == ("done", 6, 2)
    assert len(bench.started) == 6


@only_sqlite
async def test_only_own_jobs_and_served_models(bench: Bench, url: str) -> None:
    request = PerplexityRequest.model_validate(body())
    elsewhere = bench.store.add("anna", request, models=["tiny", "not served"], units=6, tokens=1).id
    left = bench.add()
    other = JobStore(url)
    own = other.add("anna", request, models=["tiny"], units=6, tokens=1).id
    async with bench.running(other, resume_jobs=False):
        await bench.ended(own)
        await asyncio.sleep(0.1)
    other.close()
    assert [bench.store.get("anna", job).state for job in (elsewhere, left, own)] == ["queued", "queued", "done"]


async def test_jobs_wait_for_an_api_key_that_is_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "log", log := CapturingLogger())
    expected, keys, run = bench.expected(), {"anna", "berta"}, WindowsUnit.run

    def revoking(unit: WindowsUnit) -> Generator[int, None, Outcome]:
        if unit.subject.method.method == "linear":
            keys.discard("anna")
        return (yield from run(unit))

    monkeypatch.setattr(WindowsUnit, "run", revoking)
    job_id, unknown = bench.add(), bench.add("carla")
    async with bench.running(keys=keys) as at_work:
        await until(lambda: "anna" not in keys)
        other = bench.add("berta", methods=[{"method": "default"}])
        at_work.notify()
        await bench.ended(other, tenant="berta")
        await asyncio.sleep(0.1)
        waiting = bench.store.get("anna", job_id)
        assert (waiting.state, waiting.units_done) == ("running", 3), "the unit at work was finished"
        assert bench.store.get("carla", unknown).state == "queued"
        with bench.store.database.reading() as session:
            rows = session.execute(select(UnfinishedUnit.position, UnfinishedUnit.owner)).all()
        assert rows == [(position, None) for position in (3, 4, 5)]
        monkeypatch.setattr(WindowsUnit, "run", run)
        keys.add("anna")
        at_work.notify()
        (job,) = await bench.ended(job_id)
    assert (job.state, bench.numbers(job_id)) == ("done", expected)
    named = [call.kwargs["tenant"] for call in log.calls if call.args == ("jobs_wait_for_their_key",)]
    assert sorted(named) == ["anna", "carla"]


@only_sqlite
async def test_old_jobs_leave(bench: Bench) -> None:
    request = PerplexityRequest.model_validate(body())
    old, left = bench.add(), bench.store.add("anna", request, models=["not served"], units=6, tokens=1).id
    async with bench.running():
        await bench.ended(old)
    with bench.store.database.writing() as session:
        long_ago = datetime.now(UTC) - timedelta(days=2.1)
        session.execute(update(Job).values(created_at=long_ago, finished_at=case((Job.id == old, long_ago))))
    async with bench.running(jobs_kept_days=3.0):
        new = bench.add(reuse=False)
        await bench.ended(new)
    assert {job.id for job in bench.store.list("anna")} == {old, left, new}
    async with bench.running(jobs_kept_days=2.0):
        await until(lambda: {job.id for job in bench.store.list("anna")} == {left, new})


@only_sqlite
async def test_old_outcomes_leave(bench: Bench) -> None:
    job_id = bench.add()
    async with bench.running():
        await bench.ended(job_id)

    def kept() -> int:
        with bench.store.database.reading() as session:
            return len(session.scalars(select(StoredOutcome.key)).all())

    assert kept() > 0
    async with bench.running(outcomes_max_bytes=1):
        await until(lambda: kept() == 0)
    assert bench.store.result("anna", job_id) is not None
