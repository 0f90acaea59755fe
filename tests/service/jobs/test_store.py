"""Jobs as their owners see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, event, insert, select, text, update

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.database.tables import Job, written
from service.jobs.planning import body_of
from service.jobs.records import JobInfo
from service.jobs.storage import measured
from service.jobs.storage.listed import listed
from service.jobs.storage.refusals import (
    IdempotencyMismatch,
    JobUnfinished,
    TooManyJobBytes,
    TooManyJobs,
    UnknownCursor,
    UnknownJob,
)
from service.jobs.storage.store import JobStore
from service.jobs.storage.terms import Terms
from service.policy.policy import Policy
from tests.service.jobs.adding import add, queue_of
from tests.service.jobs.bench import body

SIZE = len(written(body_of(PerplexityRequest.model_validate(body()))).encode())
"""Bytes of the request of a job that ``add`` makes."""


class TestIdempotency:
    def test_a_key_makes_one_job(self, store: JobStore) -> None:
        first = add(store, key="a")
        again = add(store, key="a")
        assert again.model_dump() == first.model_dump()
        assert (first.tokens_moved, again.tokens_moved) == (384, 0), "the second call queues nothing"
        others = [add(store, key="b"), add(store), add(store), add(store, tenant="berta", key="a")]
        assert len({first.id, *(job.id for job in others)}) == 5

    def test_another_request_under_a_used_key_is_refused(self, store: JobStore) -> None:
        add(store, key="a")
        with pytest.raises(IdempotencyMismatch, match="'a' was used for another request"):
            add(store, key="a", lengths=[32])

    def test_a_request_that_only_another_version_takes_is_another_one(self, store: JobStore) -> None:
        job = add(store, key="a")
        with store.database.writing() as session:
            request = job.request | {"newer": 1}
            session.execute(update(Job).where(Job.id == job.id).values(request=request))
        with pytest.raises(IdempotencyMismatch):
            add(store, key="a")

    def test_how_a_request_is_written_makes_no_difference(self, store: JobStore) -> None:
        first = add(store, key="a", methods=[{"method": "default"}])
        again = add(store, key="a", methods=[{"method": "default"}], timeout_s=None, background=True)
        assert again.id == first.id

    def test_what_auto_meant_at_admission_makes_no_difference(self, store: JobStore) -> None:
        def auto(**fields: Any) -> PerplexityRequest:
            return PerplexityRequest.model_validate(body(methods=["default", {"method": "auto"} | fields]))

        ranges = [{"up_to": None, "pe": {"method": "yarn", "factor": 2.0}}]
        by_rule, given = auto(ranges=ranges, origin={"source": "rule"}), auto(ranges=ranges)
        for key, made in (("a", by_rule), ("b", given)):
            store.add("anna", made, models=["tiny"], units=1, tokens=1, terms=Terms(idempotency_key=key))
        assert store.submitted("anna", auto(), "a") == store.submitted("anna", by_rule, "a") is not None
        assert store.submitted("anna", given, "b") is not None
        for sent, key in (
            (auto(), "b"),
            (given, "a"),
            (auto().model_copy(update={"methods": auto().methods[1:]}), "a"),
        ):
            with pytest.raises(IdempotencyMismatch):
                store.submitted("anna", sent, key)

    def test_one_of_many_at_once_makes_the_job(self, store: JobStore) -> None:
        with ThreadPoolExecutor(8) as pool:
            made = {job.id for job in pool.map(lambda _: add(store, key="a"), range(16))}
        assert len(made) == len(store.list("anna")) == 1


class TestRoom:
    """Requests that come at once share the room of their tenant."""

    @staticmethod
    def refused(call: Callable[[int], JobInfo], count: int) -> list[type[Exception]]:
        """The refusals of so many calls at once."""

        def refusal(number: int) -> type[Exception] | None:
            try:
                call(number)
            except (TooManyJobs, TooManyJobBytes) as error:
                return type(error)
            return None

        with ThreadPoolExecutor(8) as pool:
            return [error for error in pool.map(refusal, range(count)) if error is not None]

    @pytest.mark.parametrize("terms", [{"most_jobs": 3}, {"most_bytes": 3 * SIZE - 1}], ids=["jobs", "bytes"])
    def test_no_more_are_added_than_there_is_room_for(self, store: JobStore, terms: dict[str, int]) -> None:
        add(store, "berta")
        found = self.refused(lambda _: add(store, terms=Terms(**terms)), 12)
        assert found == [TooManyJobs if "most_jobs" in terms else TooManyJobBytes] * 9
        assert len(store.list("anna")) == 3
        with pytest.raises((TooManyJobs, TooManyJobBytes)):
            store.check_room("anna", Terms(**terms))

    def test_no_more_are_resumed_than_there_is_room_for(self, store: JobStore) -> None:
        ids = [store.cancel("anna", add(store).id).id for _ in range(6)]
        found = self.refused(lambda n: store.resume("anna", ids[n], Terms(most_jobs=2)), 6)
        assert found == [TooManyJobs] * 4
        assert len(store.list("anna", state="queued")) == 2
        going = next(job.id for job in store.list("anna") if job.state == "queued")
        assert store.resume("anna", going, Terms(most_jobs=1)).state == "queued", "it has its room"

    def test_a_repeated_submission_needs_no_room(self, store: JobStore) -> None:
        terms = Terms(idempotency_key="a", most_jobs=1)
        first = add(store, terms=terms)
        assert self.refused(lambda _: add(store, terms=terms), 8) == []
        assert [job.id for job in store.list("anna")] == [first.id]


class TestPolicies:
    """A policy is a tenant's own, one per model, and the last one counts."""

    @staticmethod
    def policy(fingerprint: str, factor: float) -> Policy:
        ranges = [{"up_to": 64, "pe": "default"}, {"up_to": None, "pe": {"method": "yarn", "factor": factor}}]
        calibration = {"id": "a" * 32, "created": "2026-11-22T10:00:00+00:00", "measured": {"loss": [0.1, 1e-300]}}
        fields = {"version": 1, "model": "tiny", "fingerprint": fingerprint * 64, "trained_length": 64}
        return Policy.model_validate({**fields, "ranges": ranges, "calibration": calibration})

    def test_a_policy_comes_back_to_its_tenant_only(self, store: JobStore) -> None:
        anna, other = self.policy("a", 2.0), self.policy("b", 4.0)
        store.put_policy("anna", anna)
        store.put_policy("anna", other)
        assert store.policy_of("anna", anna.fingerprint) == anna
        assert store.policy_of("anna", other.fingerprint) == other
        assert store.policy_of("berta", anna.fingerprint) is None
        store.put_policy("berta", self.policy("a", 8.0))
        store.put_policy("anna", newer := self.policy("a", 3.0))
        assert store.policy_of("anna", anna.fingerprint) == newer
        assert store.policy_of("berta", anna.fingerprint) == self.policy("a", 8.0)

    def test_many_at_once_leave_one(self, store: JobStore) -> None:
        several = [self.policy("c", float(factor)) for factor in range(2, 10)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda policy: store.put_policy("anna", policy), several))
        assert store.policy_of("anna", "c" * 64) in several


class TestTenants:
    def test_a_job_is_as_it_was_added(self, store: JobStore) -> None:
        job = add(store, model=None)
        assert store.get("anna", job.id).model_dump() == job.model_dump()
        assert (job.state, job.units_total, job.tokens_total, job.model) == ("queued", 6, 384, None)
        assert (job.seconds_left, job.error, job.started_at) == (None, None, None)
        assert timedelta(0) <= datetime.now(UTC) - job.created_at < timedelta(minutes=1)
        assert job.request == body(model=None)

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"evaluation": "perplexity"}, "persuasion"),
            ({"evaluation": "perplexity", "input": ["a b"]}, ["a b"]),
            ({"evaluation": "needle"}, "persuasion"),
            ({"evaluation": "passkey"}, None),
            ({"evaluation": "ruler"}, "persuasion"),
            ({"evaluation": "ruler", "tasks": ["vt"]}, None),
            ({"evaluation": "sweep"}, None),
        ],
    )
    def test_a_default_text_is_in_the_request(self, store: JobStore, fields: dict[str, Any], text: object) -> None:
        given = EVALUATIONS[fields["evaluation"]].request.model_validate(fields)
        job = store.add("anna", given, models=["tiny"], units=1, tokens=1)
        assert job.request.get("input") == text
        assert EVALUATIONS[job.evaluation].request.model_validate(job.request).model_dump() == given.model_dump()

    def test_a_request_made_in_python_can_be_made_again(self, store: JobStore) -> None:
        given = PerplexityRequest.model_validate(body(input="a\0b \U0001f600", lengths=None))
        methods = [type(method)(**method.model_dump(exclude={"method"})) for method in given.methods]
        given = given.model_copy(update={"methods": methods})
        job = store.add("anna", given, models=["tiny"], units=1, tokens=1)
        again = EVALUATIONS[job.evaluation].request.model_validate(store.get("anna", job.id).request)
        assert again.model_dump() == given.model_dump()

    def test_others_have_no_such_job(self, store: JobStore) -> None:
        job = add(store)
        for call in (store.get, store.cancel, store.remove, store.result):
            with pytest.raises(UnknownJob, match=job.id):
                call("berta", job.id)
        assert store.list("berta") == []
        for nothing in ("", "a\0b", "%", job.id[:31], job.id.upper() if job.id.upper() != job.id else "G" * 32):
            with pytest.raises(UnknownJob):
                store.get("anna", nothing)
            assert measured.read(store.database, "anna", nothing) is None
        assert store.get("anna", job.id).state == "queued"

    def test_listing_is_newest_first_in_pages_and_by_state(self, store: JobStore) -> None:
        ids = [add(store).id for _ in range(5)]
        store.cancel("anna", ids[1])
        assert [job.id for job in store.list("anna")] == ids[::-1]
        page = store.list("anna", limit=2)
        assert [job.id for job in page] == [ids[4], ids[3]]
        assert [job.id for job in store.list("anna", limit=2, before=page[-1].id)] == [ids[2], ids[1]]
        assert [job.id for job in store.list("anna", state="cancelled")] == [ids[1]]
        with pytest.raises(UnknownCursor, match="before: no such job: nothing"):
            store.list("anna", before="nothing")

    def test_listing_leaves_out_long_documents(self, store: JobStore) -> None:
        long = add(store, input="many words " * 5000)
        short = add(store)
        without = {name: value for name, value in long.request.items() if name != "input"}
        assert without["methods"]
        assert [job.request for job in store.list("anna")] == [short.request, without]
        assert store.get("anna", long.id).request == long.request

    def test_unfinished_jobs_of_valid_keys_are_counted(self, store: JobStore) -> None:
        for tenant in ("anna", "anna", "anna", "berta"):
            last = add(store, tenant)
        store.cancel("anna", add(store).id)
        assert (store.unfinished(), store.unfinished(["anna", "carla"]), store.unfinished([])) == (4, 3, 0)
        store.cancel("berta", last.id)
        assert store.unfinished() == 3

    def test_cancelled_is_the_end(self, store: JobStore) -> None:
        job = add(store)
        with pytest.raises(JobUnfinished):
            store.remove("anna", job.id)
        ended = store.cancel("anna", job.id)
        again = store.cancel("anna", job.id)
        assert ended.state == "cancelled"
        assert again.model_dump() == ended.model_dump()
        assert (ended.tokens_moved, again.tokens_moved) == (384, 0), "only the first call ends it"
        assert queue_of(store).waiting("tiny", ()) == {}
        store.remove("anna", job.id)
        with pytest.raises(UnknownJob):
            store.get("anna", job.id)


def test_the_number_of_a_removed_job_is_not_given_again(url: str) -> None:
    """A process that still holds the removed job would record units of the other one."""
    given: list[int] = []
    for _ in range(2):
        store = JobStore(url)
        for _ in range(3):
            job = add(store)
            with store.database.reading() as session:
                given += session.scalars(select(Job.number).where(Job.id == job.id))
            store.cancel("anna", job.id)
            store.remove("anna", job.id)
        add(store, key="a")
        add(store, key="a")
        store.close()
    assert given == sorted(set(given))


def test_numbers_of_a_database_without_a_count_go_on(sqlite_url: str) -> None:
    """Former versions counted no numbers. They may run beside this one."""
    store = JobStore(sqlite_url)
    kept = [add(store) for _ in range(3)]
    with store.database.writing() as session:
        session.execute(text("PRAGMA user_version = 0"))
    newest = add(store)
    with store.database.reading() as session:
        assert session.scalar(select(Job.number).where(Job.id == newest.id)) == 4
    assert [job.id for job in store.list("anna")] == [newest.id, *(job.id for job in kept[::-1])]
    store.close()


def test_a_thousand_jobs_are_listed_and_picked_by_index(store: JobStore) -> None:
    add(store)
    with store.database.writing() as session:
        row = dict(session.execute(select(*Job.__table__.columns)).mappings().one())
        del row["number"]
        rows = [row | {"id": f"{n:032}", "tenant": f"tenant{n % 3}"} for n in range(1000)]
        session.execute(insert(Job), rows)
        session.execute(delete(Job).where(Job.tenant == "anna"))
    queue, statements = queue_of(store), []

    @event.listens_for(store.database.engine, "before_cursor_execute")
    def count(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        if not statement.startswith("BEGIN"):
            statements.append((statement, parameters))

    assert len(store.list("tenant0", limit=50)) == 50
    assert len(statements) == 1
    assert sorted(queue.waiting("tiny", ())) == ["tenant0", "tenant1", "tenant2"]
    assert len(statements) == 6
    if store.database.engine.dialect.name == "sqlite":
        with store.database.reading() as session:
            for statement, parameters in statements[:6]:
                plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
                assert all("SCAN jobs" not in row[-1] or "INDEX" in row[-1] for row in plan), (statement, plan)
    assert json.loads(store.list("tenant1", limit=1)[0].model_dump_json())["state"] == "queued"


def test_listings_have_no_documents_of_a_sweep() -> None:
    part = {"evaluation": "perplexity", "lengths": [64], "names": ["c"]}
    assert listed({"input": "a", "evaluations": [part | {"input": "b"}]}) == {"evaluations": [part]}
    assert listed({"input": "a", "methods": ["b" * 20_000]}) == {}, "long without them too"
