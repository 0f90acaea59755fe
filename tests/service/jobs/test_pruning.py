"""Old jobs, results and outcomes leave, and no others, whatever the clock does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo

import pytest
from sqlalchemy import select
from structlog.testing import CapturingLogger

from service.jobs.database.tables import StoredOutcome
from service.jobs.records import JobInfo
from service.jobs.storage import pruning, results, units
from service.jobs.storage.pruning import PUT_OFF_S, Pruning
from service.jobs.storage.results import Packed
from service.jobs.storage.store import JobStore
from tests.service.jobs.adding import claimed, queue_of, unit

PACKED = Packed("perplexity", b"")
YEAR = timedelta(days=365)


class Clock:
    """The wall clock of this process, ``wrong`` by so much, and the other clock, ``later`` by so many seconds."""

    def __init__(self) -> None:
        self.wrong, self.later = timedelta(0), 0.0

    def now(self, zone: tzinfo) -> datetime:
        return datetime.now(zone) + self.wrong + timedelta(seconds=self.later)

    def elapsed(self) -> float:
        return time.monotonic() + self.later


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    class Moment(datetime):
        now = made.now

    for module in (results, units):
        monkeypatch.setattr(module, "datetime", Moment)
    monkeypatch.setattr(pruning, "_elapsed", made.elapsed)
    return made


def done(store: JobStore, *positions: int, reuse: bool = True, text: str = "text") -> JobInfo:
    """A job that is done, with these units."""
    queue = queue_of(store)
    job, number = claimed(store, queue, reuse=reuse, input=text)
    queue.record(number, [unit(position) for position in positions])
    assert queue.finish(number, PACKED)
    return store.get("anna", job.id)


def test_results_leave_in_the_order_of_their_making(store: JobStore, clock: Clock) -> None:
    """As after a step of the clock, or from a server whose clock is slow."""
    ids = [f"{number:032x}" for number in range(8)]
    for index, result_id in enumerate(ids):
        clock.wrong = -timedelta(hours=index // 3)
        store.put_result("anna", result_id, PACKED, most=3, most_bytes=1 << 20)
        found = [kept for kept in ids if kept_by(store, kept)]
        assert found == ids[max(0, index - 2) : index + 1]


def kept_by(store: JobStore, result_id: str) -> bool:
    with store.database.reading() as session:
        return session.get(results.StoredResult, result_id) is not None


def test_a_clock_that_jumps_ahead_removes_no_jobs_for_a_day(
    sqlite_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "log", log := CapturingLogger())
    store = JobStore(sqlite_url)
    job, pruned = done(store), Pruning(store.database)
    assert pruned.prune(1 << 20, 30.0) == (0, 0)
    clock.wrong = YEAR
    assert pruned.prune(1 << 20, 30.0) == (0, 0)
    clock.later = PUT_OFF_S - 60
    assert pruned.prune(1 << 20, 30.0) == (0, 0)
    assert store.get("anna", job.id) == job
    assert [call.args for call in log.calls] == [("jobs_not_pruned",)]
    clock.later = PUT_OFF_S + 60
    assert pruned.prune(1 << 20, 30.0) == (0, 1)
    assert [call.args for call in log.calls] == [("jobs_not_pruned",)]
    store.close()


def test_time_that_passes_is_no_jump(sqlite_url: str, clock: Clock) -> None:
    store = JobStore(sqlite_url)
    done(store)
    pruned = Pruning(store.database)
    assert pruned.prune(1 << 20, 30.0) == (0, 0)
    clock.later = 31 * pruning.DAY_S
    assert pruned.prune(1 << 20, 30.0) == (0, 1)
    store.close()


def test_a_server_with_a_wrong_clock_goes_by_that_of_postgresql(postgres_url: str, clock: Clock) -> None:
    store = JobStore(postgres_url)
    clock.wrong = YEAR
    job = done(store)
    assert job.finished_at is not None
    assert abs(job.finished_at - datetime.now(UTC)) < timedelta(hours=1)
    assert timedelta(0) <= job.finished_at - job.created_at < timedelta(hours=1)
    assert Pruning(store.database).prune(1 << 20, 30.0) == (0, 0)
    store.close()


def forget(store: JobStore) -> None:
    for job in store.list("anna"):
        store.remove("anna", job.id)


def prune(store: JobStore) -> None:
    assert Pruning(store.database).prune(1 << 20, 0.0) == (0, 2)


@pytest.mark.parametrize("leave", [forget, prune])
def test_outcomes_of_one_job_alone_leave_with_it(store: JobStore, leave: Callable[[JobStore], None]) -> None:
    done(store, 0, 1, reuse=False)
    done(store, 2, text='{"reuse":false}')
    leave(store)
    assert store.list("anna") == []
    with store.database.reading() as session:
        assert list(session.scalars(select(StoredOutcome.key))) == [unit(2).key]
