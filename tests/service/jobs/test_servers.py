"""A waiting job is planned by servers like the one that accepted it, as long as one of them lives."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select

from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.address import setup_digest, versions_of
from service.jobs.database.tables import Job, Server
from service.jobs.storage.abandoned import MOST_CLAIMS
from service.jobs.storage.owner import Owner
from service.jobs.storage.queue import JobQueue
from service.jobs.storage.store import JobStore
from service.jobs.storage.terms import Terms
from tests.service.jobs.adding import LEASE_S, add, enter, queue_of
from tests.service.jobs.bench import Bench, body, only_sqlite


def server(store: JobStore, weights: str, name: str = "") -> JobQueue:
    """The queue of a process on another machine."""
    return queue_of(store, owner=Owner("elsewhere", 1, 0.0, name or weights), weights=weights)


def age(store: JobStore, seconds: float = LEASE_S - 1) -> None:
    """As if every lease had been taken so many seconds earlier."""
    with store.database.writing() as session:
        for row in (
            *session.scalars(select(Job).where(Job.lease_until.is_not(None))),
            *session.scalars(select(Server)),
        ):
            row.lease_until -= timedelta(0, seconds)


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
    successor, twin = server(store, "new", "successor"), server(store, "former", "twin")
    assert former.claim(1) is not None
    twin.hold()
    former.release()
    assert new.claim(1) is None
    twin.release()
    assert new.waiting("tiny", ()) == {"anna": 1}, "at once: both ended in order"
    assert new.claim(1) is not None
    successor.hold()
    new.release()
    assert newer.waiting("tiny", ()) == {}, "it is a job of the new weights now"
    assert successor.claim(1) is not None
    assert store.get("anna", job.id).state == "running"


def test_the_next_jobs_are_left_alone_when_the_oldest_no_longer_waits(store: JobStore) -> None:
    like, other = server(store, "ours"), server(store, "others")
    first, *_ = [add(store, weights="ours") for _ in range(3)]
    age(store, LEASE_S + 1)
    like.hold()
    store.cancel("anna", first.id)
    assert like.claim(2) is not None
    enter(like, 2, range(6))
    assert other.claim(3) is None
    like.release()
    assert other.claim(3) is not None


def test_a_server_that_works_for_itself_keeps_no_other_job_waiting(store: JobStore) -> None:
    add(store, weights="ours")
    age(store, LEASE_S + 1)
    queue_of(store, owner=Owner("elsewhere", 1, 0.0, "own"), only_own=True).hold()
    assert server(store, "others").claim(1) is not None


def test_a_restarted_server_does_not_wait_for_itself(store: JobStore) -> None:
    add(store, weights="ours")
    age(store, LEASE_S + 1)
    restarted = server(store, "ours", "restarted")
    restarted.hold()
    claimed = restarted.claim(1)
    assert claimed is not None
    assert not claimed.others_may, "it fails the job if it cannot plan it"


def test_a_job_that_is_resumed_is_one_of_the_server_that_resumes_it(store: JobStore) -> None:
    job = add(store, weights="former")
    store.cancel("anna", job.id)
    store.resume("anna", job.id, Terms(setup=setup_digest(["tiny"], {"tiny": "new"})))
    assert server(store, "former").claim(1) is None
    assert server(store, "new").claim(1) is not None


def test_a_job_whose_planner_has_died_goes_to_a_server_like_it(store: JobStore) -> None:
    add(store, weights="ours")
    dead = queue_of(store, owner=store.owner._replace(started=store.owner.started - 100))
    assert dead.claim(1) is not None
    dead.hold()
    server(store, "ours", "alive").hold()
    assert server(store, "others").waiting("tiny", ()) == {}
    assert server(store, "ours").claim(1) is not None


def test_a_planned_job_is_joined_or_left_by_its_plan(store: JobStore) -> None:
    add(store, weights="ours")
    like, other = server(store, "ours"), server(store, "others")
    assert like.claim(1) is not None
    enter(like, 1, range(6))
    assert other.waiting("tiny", ()) == {"anna": 1}, "the runner makes its own plan and compares"


def test_a_job_that_a_server_cannot_plan_waits_for_another_of_its_setup(store: JobStore) -> None:
    add(store, weights="ours")
    like, smaller = server(store, "ours"), server(store, "ours", "smaller")
    for _ in range(2 * MOST_CLAIMS):
        refused = queue_of(store, owner=Owner("elsewhere", 1, 0.0, "restarts"), weights="ours")
        claimed = refused.claim(1)
        assert claimed is not None
        refused.refuse(1)
    claimed = smaller.claim(1)
    assert claimed is not None
    assert claimed.others_may
    smaller.refuse(1)
    for _ in range(3):
        assert smaller.waiting("tiny", ()) == {}
        age(store)
        like.hold()
    for _ in range(2):
        assert smaller.claim(1) is None
        age(store, LEASE_S / 2)
        smaller.hold()
    last = smaller.claim(1)
    assert last is not None
    assert not last.others_may, "nobody else is left to plan it"


@only_sqlite
async def test_a_server_of_smaller_limits_fails_no_job_of_another(bench: Bench) -> None:
    elsewhere = JobStore(str(bench.store.database.engine.url))
    setup = setup_digest(["tiny"], versions_of(bench.models))
    request = PerplexityRequest.model_validate(body())
    sizes = {"models": ["tiny"], "units": 6, "tokens": 384}
    job = elsewhere.add("anna", request, terms=Terms(setup), **sizes)
    own = bench.add(methods=[{"method": "default"}])
    async with bench.running(max_scored_tokens=200):
        await bench.ended(own)
        assert bench.store.get("anna", job.id).state == "queued"
        async with bench.running(elsewhere):
            (done,) = await bench.ended(job.id)
    assert done.error is None
    elsewhere.close()


@only_sqlite
async def test_a_server_fails_what_it_has_accepted_and_cannot_plan(bench: Bench) -> None:
    setup = setup_digest(["tiny"], versions_of(bench.models))
    request = PerplexityRequest.model_validate(body())
    job = bench.store.add("anna", request, models=["tiny"], units=6, tokens=384, terms=Terms(setup))
    async with bench.running(max_scored_tokens=200):
        (failed,) = await bench.ended(job.id)
    assert failed.state == "failed"
