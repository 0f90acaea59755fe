"""Units of one job claimed by several processes: once each, under leases, and only by those with the same plan."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from threading import Thread

import pytest
from sqlalchemy import select, update

from service.jobs.database.tables import UnfinishedUnit
from service.jobs.records import AtWork
from service.jobs.storage.abandoned import MOST_CLAIMS
from service.jobs.storage.claims import Recorded
from service.jobs.storage.owner import Owner
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.results import Packed
from service.jobs.storage.store import JobStore
from tests.service.jobs.adding import LEASE_S, PLAN, claimed, enter, planned, queue_of, taken, unit


def servers(store: JobStore, count: int) -> list[JobQueue]:
    """Queues of processes on other machines."""
    return [queue_of(store, owner=Owner("elsewhere", 1, 0.0, str(n))) for n in range(count)]


def age(store: JobStore, owner: str, seconds: float = LEASE_S + 1) -> None:
    """As if ``owner`` had claimed its units so many seconds earlier."""
    row = UnfinishedUnit
    with store.database.writing() as session:
        for job, position, until in session.execute(
            select(row.job, row.position, row.lease_until).where(row.owner == owner)
        ):
            one = update(row).where(row.job == job, row.position == position)
            session.execute(one.values(lease_until=until - timedelta(seconds=seconds)))


def test_every_unit_has_one_owner(store: JobStore) -> None:
    here, *others = queue_of(store), *servers(store, 5)
    job, number = planned(store, here, units=60)
    found: Counter[int] = Counter()

    def work(queue: JobQueue) -> None:
        while positions := taken(queue, number, most=4):
            found.update(positions)
            for position in positions:
                queue.record(number, [unit(position)])

    threads = [Thread(target=work, args=(queue,)) for queue in (here, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == Counter(range(60))
    assert [done.number for done in store.done_units(job.id)] == list(range(1, 61))


def test_the_process_of_the_last_unit_owns_the_job(store: JobStore) -> None:
    first, second = servers(store, 2)
    job, number = planned(store, first, units=2)
    assert (taken(first, number, 1), taken(second, number, 1)) == ([0], [1])
    assert second.record(number, [unit(1)]) is Recorded.LEFT
    assert not second.finish(number, Packed("perplexity", b""))
    assert first.record(number, [unit(0)]) is Recorded.LAST
    assert first.record(number, [unit(0)]) is Recorded.LAST, "an answer that got lost is asked for again"
    assert second.waiting("tiny", ()) == {}
    assert first.finish(number, Packed("perplexity", b""))
    assert store.get("anna", job.id).state == "done"


def test_units_of_a_lost_process_go_to_others_and_its_late_answer_is_ignored(store: JobStore) -> None:
    lost, here = *servers(store, 1), queue_of(store)
    job, number = planned(store, here, units=3)
    assert taken(lost, number) == [0, 1, 2]
    assert here.waiting("tiny", ()) == {}
    age(store, lost._owner)
    lost.beat([number])
    assert here.waiting("tiny", ()) == {}, "its lease was renewed"
    age(store, lost._owner)
    assert here.waiting("tiny", ()) == {"anna": number}
    assert taken(here, number, 2) == [0, 1]
    assert lost.record(number, [unit(0)]) is Recorded.LEFT
    assert store.done_units(job.id) == []
    assert here.record(number, [unit(0), unit(1)]) is Recorded.LEFT
    assert lost.record(number, [unit(0)]) is Recorded.LEFT
    assert [done.number for done in store.done_units(job.id)] == [1, 2]


def test_a_unit_that_was_freed_meanwhile_is_recorded_as_measured(store: JobStore) -> None:
    """As after the database was out of reach for longer than a lease."""
    measured, here = *servers(store, 1), queue_of(store)
    job, number = planned(store, here, units=3, reuse=False)
    assert taken(measured, number, 2) == [0, 1]
    age(store, measured._owner)
    assert here.waiting("tiny", ()) == {"anna": number}, "its units are free"
    assert measured.record(number, [unit(0)]) is Recorded.LEFT
    assert measured.record(number, [unit(0)]) is Recorded.LEFT, "an answer that got lost is asked for again"
    assert taken(here, number) == [1, 2]
    assert here.record(number, [unit(1), unit(2)]) is Recorded.LAST
    assert [done.reused for done in store.done_units(job.id)] == [False, False, False]
    info = store.get("anna", job.id)
    assert (info.units_done, info.units_reused, info.tokens_done) == (3, 0, 180)


def test_a_freed_unit_of_another_plan_is_not_recorded(store: JobStore) -> None:
    late, here = *servers(store, 1), queue_of(store)
    job, number = planned(store, here)
    assert late.record(number, [unit(0, key="of an older plan")]) is Recorded.LEFT
    assert store.done_units(job.id) == []
    assert taken(here, number, 1) == [0]


def test_a_claimed_unit_of_another_plan_is_not_recorded(store: JobStore) -> None:
    """A process claims units of the new plan while it measures one of the old plan."""
    late, here = servers(store, 2)
    job, number = planned(store, here)
    assert taken(late, number, 1) == [0]
    assert late.record(number, [unit(0, key="of an older plan")]) is Recorded.LEFT
    assert store.done_units(job.id) == []
    assert late.record(number, [unit(0)]) is Recorded.LEFT
    assert len(store.done_units(job.id)) == 1


def test_a_unit_that_kills_every_process_ends_its_job(store: JobStore) -> None:
    here = queue_of(store)
    job, number = planned(store, here, units=2)
    for _ in range(MOST_CLAIMS):
        assert store.get("anna", job.id).state == "running"
        assert taken(here, number) == [0, 1]
        here.waiting("tiny", ())  # it claims units and does not hold the job: it gave up
    failed = store.get("anna", job.id)
    assert failed.error is not None
    assert (failed.state, failed.error.code) == ("failed", "no_progress")
    assert "ropeway jobs resume" in failed.error.message


def test_a_death_counts_once_if_the_next_process_has_another_plan(store: JobStore) -> None:
    queues = servers(store, MOST_CLAIMS + 1)
    for queue in queues:
        queue._lease_s = 0.0
    job, number = planned(store, queues[0])
    for dead, successor in pairwise(queues):
        assert store.get("anna", job.id).state == "running"
        assert taken(dead, number, 1) == [0]
        successor.waiting("tiny", ())
        if taken(successor, number, 1):
            successor.leave(number, PLAN)
            assert successor.claim(number) is not None
            enter(successor, number, range(6))
    assert store.get("anna", job.id).state == "failed"


def test_jobs_that_share_a_unit_do_not_run_it_at_once(store: JobStore) -> None:
    first, second = servers(store, 2)
    _, other = claimed(store, second)
    _, one = planned(store, first, units=2)
    enter(second, other, (0, 5))
    assert taken(first, one) == [0, 1]
    assert taken(second, other) == [5]
    first.record(one, [unit(0)])
    later = second.take(other, "tiny", 6)
    assert later is not None
    assert later.units == [(0, True)], "the outcome is stored"


def test_equal_units_of_one_job_run_one_after_another(store: JobStore) -> None:
    queue = queue_of(store)
    _, number = claimed(store, queue)
    queue.enter(number, "plan", [(position, "same key", "tiny") for position in range(3)])
    assert taken(queue, number) == [0]
    queue.record(number, [unit(0, key="same key")])
    found = queue.take(number, "tiny", 6)
    assert found is not None
    assert found.units == [(1, True)]


def test_a_process_with_another_plan_leaves_the_job_until_nobody_works_on_it(store: JobStore) -> None:
    at_work, other = servers(store, 2)
    _, number = planned(store, at_work)
    assert taken(at_work, number, 1) == [0]
    assert taken(other, number, 2) == [1, 2]
    other.leave(number, PLAN)
    assert other.waiting("tiny", ()) == {}
    assert other.claim(number) is None
    assert taken(at_work, number, 2) == [1, 2], "what it had claimed is free again"
    with store.database.writing() as session:
        session.execute(update(UnfinishedUnit).values(lease_until=None, owner=None))
    assert other.waiting("tiny", ()) == {}, "the plan is in use between two claims too"


def test_a_plan_that_nobody_uses_any_more_is_replaced(store: JobStore) -> None:
    gone, other = servers(store, 2)
    gone._lease_s = 0.0
    _, number = planned(store, gone)
    assert taken(other, number, 1) == [0]
    other.leave(number, PLAN)
    assert other.waiting("tiny", ()) == {"anna": number}
    assert other.take(number, "tiny", 1) is None, "its units are those of the other plan"
    assert other.claim(number) is not None
    enter(other, number, range(2))
    assert taken(other, number) == [0, 1]


def test_jobs_that_were_left_are_forgotten_at_their_end(store: JobStore) -> None:
    """Each stayed in every look for work, until the statement had more values than a database takes."""
    at_work, other = servers(store, 2)
    job, number = planned(store, at_work)
    other.leave(number, PLAN)
    other.hold()
    assert other._other_plans == {number: PLAN}
    store.cancel("anna", job.id)
    other.hold()
    assert other._other_plans == {}


def test_a_new_plan_of_a_job_that_was_left_is_joined(store: JobStore) -> None:
    """As after an update of several servers in turn: the job begins again on one, and the others help."""
    gone, first, second = servers(store, 3)
    gone._lease_s = 0.0
    _, number = planned(store, gone)
    for other in (first, second):
        assert taken(other, number, 1) == [0]
        other.leave(number, PLAN)
    assert first.claim(number) is not None
    first.enter(number, "a new plan", [(position, unit(position).key, "tiny") for position in range(3)])
    assert taken(first, number, 1) == [0]
    assert second.waiting("tiny", ()) == {"anna": number}
    assert taken(second, number) == [1, 2]


def test_progress_of_other_processes_is_counted(store: JobStore) -> None:
    elsewhere, here = *servers(store, 1), queue_of(store)
    job, number = planned(store, here)
    assert taken(elsewhere, number, 1) == [0]
    elsewhere.beat([number], {(number, 0): 30})
    assert store.get("anna", job.id).tokens_done == 30
    store.in_flight[job.id] = {1: AtWork(12, time.perf_counter())}
    assert store.get("anna", job.id).tokens_done == 42
    elsewhere.record(number, [unit(0)])
    assert store.get("anna", job.id).tokens_done == 72


def test_an_orderly_end_leaves_others_their_units(store: JobStore) -> None:
    ending, other = servers(store, 2)
    job, number = planned(store, ending)
    assert (taken(ending, number, 2), taken(other, number, 2)) == ([0, 1], [2, 3])
    ending.release([number])
    assert store.get("anna", job.id).state == "running"
    assert taken(other, number) == [0, 1, 4, 5]
    other.release([number])
    assert store.get("anna", job.id).state == "queued"


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_a_job_that_ends_has_no_units_left(store: JobStore, end: str) -> None:
    first, second = servers(store, 2)
    job, number = planned(store, first)
    assert (taken(first, number, 2), taken(second, number, 2)) == ([0, 1], [2, 3])
    if end == "cancel":
        store.cancel("anna", job.id)
    else:
        assert second.fail(number, "internal_error", "a defect")
    assert first.record(number, [unit(0)]) is Recorded.LOST
    assert (first.beat([number]), taken(first, number)) == (set(), [])
    store.resume("anna", job.id)
    assert first.claim(number) is not None


def test_orderly_ends_in_long_units_are_no_fault(store: JobStore) -> None:
    """A server is replaced several times before the first unit is done."""
    queue = queue_of(store)
    job, number = planned(store, queue)
    for _ in range(2 * MOST_CLAIMS):
        assert taken(queue, number, 1) == [0]
        queue.release([number])
        assert store.get("anna", job.id).state == "queued"
        queue = queue_of(store)
        assert queue.claim(number) is not None
        enter(queue, number, range(6))
