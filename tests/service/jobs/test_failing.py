"""Jobs among failures: units that fail, plans that no longer fit, damaged outcomes, a lost server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
import time
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session
from structlog.testing import CapturingLogger

from patches import SlotsExhausted
from service.api.errors import as_api_error
from service.engine.failures import EngineFailed
from service.errors import ApiError
from service.evaluation.perplexity.plan import PerplexityPlan, WindowsUnit
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.unit import Outcome
from service.jobs.database.calls import StoreCalls
from service.jobs.database.tables import Job, StoredOutcome, StoredResult, UnfinishedUnit
from service.jobs.execution import MOST_RETRIES
from service.jobs.runner import JobRunner
from service.jobs.storage import outcomes, results, units
from service.jobs.storage.owner import Owner
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.refusals import ResultDamaged
from service.jobs.storage.units import Finished
from service.sharing.admission import QueueFull
from service.sharing.workers import MAX_WAITING, Workers
from tests.service.jobs.adding import planned, queue_of
from tests.service.jobs.bench import LONG, Bench, only_sqlite
from tests.service.serving import until


@only_sqlite
@pytest.mark.parametrize(
    ("error", "times", "state", "code"),
    [
        (MemoryError("out of memory"), MOST_RETRIES, "done", None),
        (MemoryError("out of memory"), MOST_RETRIES + 1, "failed", "out_of_memory"),
        (EngineFailed("stalls"), MOST_RETRIES, "done", None),
        (EngineFailed("stalls"), MOST_RETRIES + 1, "failed", "engine_failed"),
        (SlotsExhausted("128"), 2 * MOST_RETRIES, "done", None),
        (QueueFull("full"), 2 * MOST_RETRIES, "done", None),
        (KeyError("a defect"), 1, "failed", "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_units_that_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, state: str, code: str | None
) -> None:
    run, left = WindowsUnit.run, [times]

    def failing(unit: WindowsUnit) -> Generator[int, None, Outcome]:
        if unit.subject.method.method == "linear" and left[0]:
            left[0] -= 1
            raise error
        return (yield from run(unit))

    monkeypatch.setattr(WindowsUnit, "run", failing)
    job_id, other = bench.add(), bench.add("berta", methods=[{"method": "default"}])
    async with bench.running():
        (job,) = await bench.ended(job_id)
        (unharmed,) = await bench.ended(other, tenant="berta")
    assert (job.state, unharmed.state, left) == (state, "done", [0])
    assert (job.error.code if job.error else None) == code
    assert job.error is None or job.error.message.startswith("linear(factor=2), length 64, "), job.error
    assert bench.models.default.engine.patch.slots.in_use() == 0
    if state == "done":
        assert set(Counter(unit.number for unit in bench.store.done_units(job_id)).values()) == {1}


@only_sqlite
async def test_a_result_that_fails_is_of_no_unit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error had the label of the unit that ended last."""

    def failing(_: PerplexityPlan, __: Sequence[Outcome]) -> PerplexityResult:
        raise ApiError(500, "a defect")

    monkeypatch.setattr(PerplexityPlan, "result", failing)
    async with bench.running() as runner:
        job_id = bench.add()
        runner.notify()
        (job,) = await bench.ended(job_id)
    assert job.error is not None
    assert (job.state, job.error.message, job.units_done) == ("failed", "a defect", 6)


@only_sqlite
async def test_a_value_that_the_database_refuses_ends_its_job_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a death of the server, five times, and all jobs waited."""
    add_finished = units.add_finished

    def refused(session: Session, job: Job, unit: Finished) -> None:
        if job.tenant == "anna":
            raise DataError("INSERT", {}, Exception("text fields cannot contain NUL"))
        add_finished(session, job, unit)

    monkeypatch.setattr(units, "add_finished", refused)
    job_id, other = bench.add(), bench.add("berta", methods=[{"method": "default"}])
    async with bench.running():
        (job,) = await bench.ended(job_id)
        (unharmed,) = await bench.ended(other, tenant="berta")
        again = bench.add(methods=[{"method": "default"}])  # its outcomes are stored: it is refused as it is planned
        (planned_,) = await bench.ended(again)
    for failed in (job, planned_):
        assert (failed.state, failed.error and failed.error.code) == ("failed", "not_storable")
        assert failed.error is not None
        assert failed.error.message.endswith("the database does not take a value: text fields cannot contain NUL")
    assert unharmed.state == "done"


@only_sqlite
async def test_what_cannot_be_planned_any_more_fails_with_its_message(bench: Bench) -> None:
    job_id, other = bench.add(), bench.add("berta", methods=[{"method": "default"}])
    async with bench.running(max_scored_tokens=200):
        (job,) = await bench.ended(job_id)
        (unharmed,) = await bench.ended(other, tenant="berta")
    assert job.error is not None
    assert (job.state, job.error.code) == ("failed", "invalid_value")
    assert "200" in job.error.message
    assert unharmed.state == "done"


async def test_a_damaged_outcome_is_measured_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(outcomes, "log", log)
    expected = bench.expected()
    first = bench.add()
    async with bench.running() as runner:
        await bench.ended(first)
        bench.started.clear()
        with bench.store.database.writing() as session:
            key = session.scalars(select(StoredOutcome.key)).first()
            session.execute(update(StoredOutcome).where(StoredOutcome.key == key).values(data=b"PK broken"))
        again = bench.add()
        runner.notify()
        (job,) = await bench.ended(again)
    assert (job.units_reused, len(bench.started)) == (5, 1)
    assert bench.numbers(again) == expected
    assert {call.args for call in log.calls} == {("outcome_damaged",)}


@only_sqlite
async def test_a_damaged_result_is_made_again_of_its_outcomes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(results, "log", log)
    job_id = bench.add()
    async with bench.running() as runner:
        await bench.ended(job_id)
        made = bench.store.result("anna", job_id)
        assert made is not None
        bench.started.clear()
        damaged = bytearray(made.data)
        damaged[len(damaged) // 2] ^= 0x10
        with bench.store.database.writing() as session:
            session.execute(update(StoredResult).values(data=bytes(damaged)))
        for read in (bench.store.result, bench.store.find_result):
            with pytest.raises(ResultDamaged, match=f"{job_id} is damaged: resume its job") as caught:
                read("anna", job_id)
        refusal = as_api_error(caught.value)
        assert (refusal.status, refusal.code) == (409, "result_damaged")
        assert bench.store.resume("anna", job_id).state == "queued"
        runner.notify()
        (job,) = await bench.ended(job_id)
    assert (job.state, job.units_done, bench.started) == ("done", 6, [])
    assert bench.store.result("anna", job_id) == made
    assert {call.args for call in log.calls} == {("result_damaged",)}


def test_no_flipped_bit_and_no_missing_byte_changes_what_is_read() -> None:
    contents = b'{"nll": [0.25, 0.5, 0.75]}' * 9
    packed = gzip.compress(contents, mtime=0)
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(zlib.error):
            assert b"".join(results.unpacked(bytes(damaged))) == contents, "only a field of the header"
    for size in range(len(packed)):
        with pytest.raises(zlib.error):
            b"".join(results.unpacked(packed[:size]))


@only_sqlite
async def test_damage_during_a_job_is_repaired_before_its_result(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, finish = bench.expected(), JobQueue.outcomes
    damaged = []

    def damaging(queue: JobQueue, number: int) -> dict[int, Outcome]:
        if not damaged:
            with bench.store.database.writing() as session:
                damaged.append(session.execute(update(StoredOutcome).values(data=b"")))
        return finish(queue, number)

    monkeypatch.setattr(JobQueue, "outcomes", damaging)
    bench.started.clear()
    job_id = bench.add()
    async with bench.running():
        (job,) = await bench.ended(job_id)
    assert (job.state, job.units_done, len(bench.started)) == ("done", 6, 12)
    assert bench.numbers(job_id) == expected


@only_sqlite
async def test_units_of_a_lost_server_are_taken_over_within_a_second_after_the_lease(bench: Bench) -> None:
    job_id = bench.add(**LONG)
    lost = queue_of(bench.store, owner=Owner("elsewhere", 1, 0.0, "lost"), lease_s=2.0)
    async with bench.running(lease_s=2.0) as runner:
        await until(lambda: runner.progress(job_id) > 0)
        began, taken = time.monotonic(), lost.take(1, "tiny", 2)
        assert taken is not None
        freed = False
        while not freed:
            await asyncio.sleep(0.05)
            with bench.store.database.reading() as session:
                freed = not session.scalars(select(UnfinishedUnit).where(UnfinishedUnit.owner == lost._owner)).all()
        assert 1.5 < time.monotonic() - began < 10, "within the lease and a little more"
        (job,) = await bench.ended(job_id)
    assert (job.state, job.units_done, len(bench.started)) == ("done", 3, 3)


@only_sqlite
async def test_a_job_waits_while_requests_fill_the_threads(bench: Bench) -> None:
    workers, calls, gate = Workers(shared=False, threads=2), StoreCalls(), threading.Event()
    requests = [asyncio.create_task(workers.run(gate.wait)) for _ in range(2 + MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await workers.run(gate.wait)
    job_id = bench.add()
    runner = JobRunner(bench.store, bench.models, bench.settings, workers, calls, as_api_error)
    runner.start()
    try:
        await until(lambda: bench.store.get("anna", job_id).state == "running")
        await asyncio.sleep(0.1)
        assert bench.store.get("anna", job_id).state == "running"
        gate.set()
        (job,) = await bench.ended(job_id)
    finally:
        gate.set()
        await asyncio.gather(*requests)
        await runner.close()
        workers.close()
        calls.close()
    assert job.error is None
    assert job.state == "done"


@only_sqlite
async def test_a_job_that_is_dropped_while_units_are_claimed_runs_none_of_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, begun, loop = bench.add(), list[float](), asyncio.get_running_loop()
    run = WindowsUnit.run

    def noted(unit: WindowsUnit) -> Generator[int, None, Outcome]:
        begun.append(time.monotonic())
        return (yield from run(unit))

    monkeypatch.setattr(WindowsUnit, "run", noted)
    async with bench.running() as runner:
        execution, dropped = runner._execution, asyncio.Event()
        take = execution._queue.take

        async def drop(number: int) -> None:
            """As a beat that finds the job ended."""
            runner._jobs.drop(runner._jobs.active[number])
            dropped.set()

        def cancelled_behind(number: int, *args: Any, **options: Any) -> Any:
            found = take(number, *args, **options)
            if found is not None and not dropped.is_set():
                bench.store.cancel("anna", job_id)
                asyncio.run_coroutine_threadsafe(drop(number), loop).result()
            return found

        monkeypatch.setattr(execution._queue, "take", cancelled_behind)
        await asyncio.wait_for(dropped.wait(), 30)
        await asyncio.sleep(0.2)
    assert bench.store.get("anna", job_id).state == "cancelled"
    assert not begun


@only_sqlite
async def test_a_job_planned_by_other_code_or_hardware_begins_again(bench: Bench) -> None:
    """A server that starts anew may have another plan, for example after an update. Its predecessor left free units."""
    gone = queue_of(bench.store, owner=Owner("elsewhere", 1, 0.0, "gone"), lease_s=0.5)
    job, _ = planned(bench.store, gone, units=3)
    async with bench.running():
        (done,) = await bench.ended(job.id)
    assert done.state == "done"
    assert bench.numbers(job.id) == bench.expected()
