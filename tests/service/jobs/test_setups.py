"""A waiting job is planned by servers like the one that accepted it, as long as one of them lives."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select, update

from service.jobs.database.tables import Job
from service.jobs.storage.owner import Owner
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.store import JobStore
from tests.service.jobs.adding import LEASE_S, add, enter, queue_of


def server(store: JobStore, weights: str, name: str = "") -> JobQueue:
    """The queue of a process on another machine."""
    return queue_of(store, owner=Owner("elsewhere", 1, 0.0, name or weights), weights=weights)


def age(store: JobStore, seconds: float = LEASE_S - 1) -> None:
    """As if every lease had been taken so many seconds earlier."""
    with store.database.writing() as session:
        for number, until in session.execute(select(Job.number, Job.lease_until)):
            session.execute(update(Job).where(Job.number == number).values(lease_until=until - timedelta(0, seconds)))


def test_other_weights_leave_waiting_jobs_alone_while_a_server_like_theirs_lives(store: JobStore) -> None:
    like, other = server(store, "ours"), server(store, "others")
    numbers = [1, 2]
    for _ in numbers:
        add(store, weights="ours")
    for _ in range(3):
        age(store)
        assert other.waiting("tiny", ()) == {}
        assert [other.claim(number) for number in numbers] == [None, None]
        other.hold()
        like.hold()
    assert like.waiting("tiny", ()) == {"anna": 1}
    assert like.claim(1) is not None


def test_jobs_of_weights_that_nobody_has_any_more_are_planned_with_new_ones(store: JobStore) -> None:
    job, former = add(store, weights="former"), server(store, "former")
    new, newer = server(store, "new"), server(store, "newer")
    assert former.claim(1) is not None
    former.release()
    assert new.claim(1) is None, "another server of the former weights may go on"
    age(store, LEASE_S + 1)
    assert new.waiting("tiny", ()) == {"anna": 1}
    assert new.claim(1) is not None
    new.release()
    assert newer.waiting("tiny", ()) == {}, "it is a job of the new weights now"
    assert server(store, "new", "successor").claim(1) is not None
    assert store.get("anna", job.id).state == "running"


def test_a_job_whose_planner_has_died_goes_to_a_server_like_it(store: JobStore) -> None:
    add(store, weights="ours")
    dead = queue_of(store, owner=store.owner._replace(started=store.owner.started - 100))
    assert dead.claim(1) is not None
    assert server(store, "others").waiting("tiny", ()) == {}
    assert server(store, "ours").claim(1) is not None


def test_a_planned_job_is_joined_or_left_by_its_plan(store: JobStore) -> None:
    add(store, weights="ours")
    like, other = server(store, "ours"), server(store, "others")
    assert like.claim(1) is not None
    enter(like, 1, range(6))
    assert other.waiting("tiny", ()) == {"anna": 1}, "the runner makes its own plan and compares"
