"""Jobs as their workers see them: claimed by one, counted once, measured again where the store is damaged."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import numpy as np
import psutil
import pytest
from sqlalchemy import select, text, update
from structlog.testing import CapturingLogger

from service.evaluation.cost import Cost
from service.jobs.database.tables import Job, StoredOutcome
from service.jobs.records import AtWork
from service.jobs.storage import outcomes, owner
from service.jobs.storage.abandoned import MOST_CLAIMS
from service.jobs.storage.claims import LeaseLost, Recorded
from service.jobs.storage.outcomes import pack, unpack
from service.jobs.storage.owner import Owner
from service.jobs.storage.pruning import Pruning
from service.jobs.storage.results import Packed
from service.jobs.storage.store import JobStore
from tests.service.jobs.adding import DATA, LEASE_S, add, claimed, enter, queue_of, taken, unit


class TestWork:
    def test_finished_units_are_counted_and_numbered_once(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        assert queue.begin(number, [f"{n:064}" for n in range(6)], Cost(360, 6, 6)) == set()
        enter(queue, number, range(6))
        assert taken(queue, number) == list(range(6))
        for _ in range(2):  # an answer that got lost is asked for again
            assert queue.record(number, [unit(4)]) is Recorded.LEFT
        assert queue.record(number, [unit(1), unit(4), unit(2, data=None)]) is Recorded.LEFT
        found = store.get("anna", job.id)
        assert (found.state, found.units_done, found.units_reused) == ("running", 3, 1)
        assert (found.tokens_done, found.tokens_total, found.seconds) == (180, 360, 1.0)
        assert found.tokens_reused == 60
        assert found.seconds_left == 1.0 / 120 * 180
        done = store.done_units(job.id)
        assert [(u.number, u.reused, u.summary["nll_mean"]) for u in done] == [
            (1, False, 4.1),
            (2, False, 1.1),
            (3, True, 2.1),
        ]
        assert store.done_units(job.id, after=2) == done[2:]
        now = time.perf_counter()
        store.in_flight[job.id] = {0: AtWork(30, now - 5)}
        found = store.get("anna", job.id)
        assert (found.tokens_done, found.seconds) == (210, pytest.approx(6, abs=0.9))
        assert found.seconds_left == pytest.approx(found.seconds / 150 * 150)
        store.in_flight[job.id] = {0: AtWork(30, now - 5), 4: AtWork(60, now - 500)}
        found = store.get("anna", job.id)
        assert (found.tokens_done, found.seconds) == (210, pytest.approx(6, abs=0.9)), "an ended unit counts once"
        assert [info.tokens_done for info in store.list("anna")] == [210]

    def test_what_was_finished_of_another_plan_counts_no_longer(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.record(number, [unit(0), unit(1), unit(2, data=None)])
        keys = [f"{0:064}", "other", f"{2:064}"]
        assert queue.begin(number, keys, Cost(180, 3, 3)) == {0, 2}
        found = store.get("anna", job.id)
        assert (found.units_done, found.units_reused, found.tokens_done, found.seconds) == (2, 1, 120, 0.5)

    def test_numbers_of_units_are_never_given_again(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.record(number, [unit(0), unit(1), unit(2)])
        queue.begin(number, [f"{0:064}", "other", "another"], Cost(180, 3, 3))
        assert [done.number for done in store.done_units(job.id)] == [1]
        queue.record(number, [unit(1, key="other"), unit(2, key="another")])
        assert [done.number for done in store.done_units(job.id, after=3)] == [4, 5]

    def test_results_come_back_to_the_bit(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        assert store.result("anna", job.id) is None
        packed = Packed("perplexity", gzip.compress(bytes(range(256))))
        assert queue.finish(number, packed)
        assert store.result("anna", job.id) == packed == store.find_result("anna", job.id)
        assert store.find_result("berta", job.id) is None
        found = store.get("anna", job.id)
        assert (found.state, found.seconds_left) == ("done", None)
        assert found.finished_at is not None
        assert not queue.fail(number, "late", "too late")

    def test_failure_keeps_code_and_message(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.fail(number, "invalid_value", "lengths: 9 is too long")
        found = store.get("anna", job.id)
        assert found.state == "failed"
        assert found.error is not None
        assert (found.error.code, found.error.message) == ("invalid_value", "lengths: 9 is too long")

    def test_cancelling_takes_the_job_away_and_leaves_the_outcomes(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        assert queue.beat([number]) == {number}
        store.cancel("anna", job.id)
        assert queue.beat([number]) == set()
        assert queue.record(number, [unit(0)]) is Recorded.LOST
        assert store.done_units(job.id) == []
        assert queue.outcome(unit(0).key) is not None
        with pytest.raises(LeaseLost):
            queue.begin(number, [], Cost())

    def test_removing_takes_the_units_along(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.record(number, [unit(0)])
        queue.finish(number, Packed("perplexity", b""))
        store.remove("anna", job.id)
        assert store.done_units(job.id) == []
        with store.database.reading() as session:
            assert session.scalar(text("SELECT count(*) FROM finished_units")) == 0

    def test_oldest_job_of_each_tenant_that_fits_the_models(self, store: JobStore) -> None:
        add(store, "anna", ("tiny", "other"))
        anna = [add(store, "anna", ("tiny", "tiny-alibi")), add(store, "anna")]
        berta = add(store, "berta")
        with store.database.reading() as session:
            number = dict(session.execute(select(Job.id, Job.number)).all())
        queue = queue_of(store, "tiny", "tiny-alibi")
        expected = {"anna": number[anna[0].id], "berta": number[berta.id]}
        assert queue.waiting("tiny", ()) == expected
        assert queue.waiting("tiny-alibi", ()) == {"anna": number[anna[0].id]}
        assert queue.waiting("tiny", {number[anna[0].id]})["anna"] == number[anna[1].id]
        assert queue_of(store, "tiny").waiting("tiny", ())["anna"] == number[anna[1].id]
        assert queue_of(store, "third").waiting("third", ()) == {}


DEAD = "from service.jobs.storage.owner import Owner; print(Owner.this())"


class TestLeases:
    def test_one_of_many_gets_the_job(self, store: JobStore) -> None:
        add(store)
        queues = [queue_of(store, owner=store.owner._replace(instance=str(n))) for n in range(8)]
        (number,) = queues[0].waiting("tiny", ()).values()
        found: list[int] = []

        def claim(index: int) -> None:
            if queues[index].claim(number) is not None:
                found.append(index)

        threads = [Thread(target=claim, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1

    def test_a_lease_ends_unless_it_is_renewed(self, store: JobStore) -> None:
        elsewhere = queue_of(store, owner=Owner("elsewhere", 1, 0.0, "a"))
        _, number = claimed(store, elsewhere)
        here = queue_of(store)
        assert here.waiting("tiny", ()) == {}
        assert here.claim(number) is None
        self.age(store, LEASE_S + 1)
        elsewhere.beat([number])
        assert here.claim(number) is None
        self.age(store, LEASE_S + 1)
        assert here.waiting("tiny", ()) == {"anna": number}
        assert here.claim(number) is not None
        assert not elsewhere.finish(number, Packed("perplexity", b""))
        assert not elsewhere.fail(number, "late", "too late")
        with pytest.raises(LeaseLost):
            elsewhere.begin(number, [], Cost())

    def test_a_process_that_has_ended_leaves_its_job_at_once(self, store: JobStore) -> None:
        said = subprocess.run([sys.executable, "-c", DEAD], capture_output=True, text=True, check=True, env=os.environ)
        _, number = claimed(store, queue_of(store, owner=Owner.parse(said.stdout)))
        assert queue_of(store).claim(number) is not None

    def test_a_later_process_of_the_same_number_is_another(self, store: JobStore) -> None:
        _, number = claimed(store, queue_of(store, owner=store.owner._replace(started=store.owner.started - 100)))
        assert queue_of(store).claim(number) is not None

    @pytest.mark.skipif(not psutil.LINUX, reason="elsewhere psutil follows the clock")
    def test_a_step_of_the_clock_leaves_a_living_process_its_job(
        self, store: JobStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, number = claimed(store, queue_of(store, owner=Owner.this()))
        boot, before = psutil.boot_time(), psutil.Process().create_time()
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 3600)  # as the kernel's own is after a step
        assert psutil.Process().create_time() > before + 3000
        assert queue_of(store).claim(number) is None

    def test_a_record_of_a_former_version_counts_until_its_lease_runs_out(self, store: JobStore) -> None:
        host = Owner.this().host.replace(f" {owner.SINCE_BOOT}", "")
        former = Owner(host, os.getpid(), psutil.Process().create_time(), "former")
        _, number = claimed(store, queue_of(store, owner=former))
        assert queue_of(store).claim(number) is None
        self.age(store, LEASE_S + 1)
        assert queue_of(store).claim(number) is not None

    def test_a_machine_of_the_same_name_is_another(
        self, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        boot_id = tmp_path / "boot_id"
        monkeypatch.setattr(owner, "BOOT_ID", boot_id)
        boot_id.write_text("theirs\n")
        _, number = claimed(store, queue_of(store, owner=Owner.this()._replace(started=0.0)))
        boot_id.write_text("ours\n")
        assert queue_of(store).claim(number) is None
        boot_id.write_text("theirs\n")
        assert queue_of(store).claim(number) is not None

    def test_a_living_process_keeps_its_job(self, store: JobStore) -> None:
        _, number = claimed(store, queue_of(store, owner=store.owner._replace(instance="other")))
        assert queue_of(store).claim(number) is None

    def test_released_jobs_wait_for_anybody(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        enter(queue, number, range(2))
        assert taken(queue, number) == [0, 1]
        queue.record(number, [unit(0)])
        queue.release()
        assert store.get("anna", job.id).state == "queued"
        assert queue_of(store, owner=Owner("elsewhere", 1, 0.0, "a")).claim(number) is not None
        assert len(store.done_units(job.id)) == 1

    def test_a_job_that_is_begun_again_and_again_without_a_finished_unit_fails(self, store: JobStore) -> None:
        queue = queue_of(store)  # what it owns and does not hold, it gave up
        job, number = claimed(store, queue)
        for _ in range(MOST_CLAIMS - 1):
            assert queue.claim(number) is not None
        assert store.get("anna", job.id).state == "running"
        assert queue.claim(number) is None
        failed = store.get("anna", job.id)
        assert failed.error is not None
        assert (failed.state, failed.error.code) == ("failed", "no_progress")
        assert failed.finished_at is not None
        assert queue.waiting("tiny", ()) == {}
        assert queue.beat([number]) == set()

    def test_a_finished_unit_and_an_orderly_end_are_no_fault(self, store: JobStore) -> None:
        queue = queue_of(store)
        _, number = claimed(store, queue)
        for position in range(3):
            for _ in range(MOST_CLAIMS - 1):
                assert queue.claim(number) is not None
            assert queue.record(number, [unit(position)]) is Recorded.LAST, "no unit of it is planned"
        for _ in range(2 * MOST_CLAIMS):
            queue.release()
            assert queue.claim(number) is not None

    def test_only_own_leaves_out_what_others_added(self, url: str, store: JobStore) -> None:
        add(store, "anna")
        other = JobStore(url)
        own = add(other, "berta")
        waiting = queue_of(other, only_own=True).waiting("tiny", ())
        assert list(waiting) == ["berta"]
        with other.database.reading() as session:
            assert session.scalar(select(Job.id).where(Job.number == waiting["berta"])) == own.id
        other.close()

    @staticmethod
    def age(store: JobStore, seconds: float) -> None:
        """As if every lease had been taken so many seconds earlier."""
        with store.database.writing() as session:
            (until,) = session.scalars(select(Job.lease_until)).all()
            assert until is not None
            session.execute(update(Job).values(lease_until=until - timedelta(seconds=seconds)))


class TestOutcomes:
    def test_bytes_are_arrays_again(self) -> None:
        outcome = {"nll": np.array([0.1, 1e-300, 7.0]), "ranks": np.array([[1], [2]], np.int64), "none": np.zeros(0)}
        again = unpack(pack(outcome))
        assert again.keys() == outcome.keys()
        for name, array in outcome.items():
            assert again[name].dtype == array.dtype
            np.testing.assert_array_equal(again[name], array)

    def test_objects_are_no_outcomes(self) -> None:
        with pytest.raises(TypeError, match="things"):
            pack({"things": np.array([object()])})

    @pytest.mark.parametrize("damage", ["flipped", "swapped", "empty"])
    def test_damage_is_seen_and_makes_units_unfinished(
        self, store: JobStore, damage: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = CapturingLogger()
        monkeypatch.setattr(outcomes, "log", log)
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.record(number, [unit(0), unit(1, data=pack({"nll": np.ones(3)})), unit(2, data=None, key="f" * 64)])
        with store.database.writing() as session:
            data = session.scalar(select(StoredOutcome.data).where(StoredOutcome.key == unit(1).key))
            assert data is not None
            wrong = {"flipped": bytes([*data[:-40], data[-40] ^ 1, *data[-39:]]), "swapped": DATA, "empty": b""}[damage]
            session.execute(update(StoredOutcome).where(StoredOutcome.key == unit(1).key).values(data=wrong))
        found = queue.outcomes(number)
        assert list(found) == [0]  # the third was never there
        np.testing.assert_array_equal(found[0]["nll"], np.arange(3.0))
        assert queue.outcome(unit(1).key) is None
        assert (store.get("anna", job.id).units_done, len(store.done_units(job.id))) == (1, 1)
        assert {call.args for call in log.calls} == {("outcome_damaged",)}
        queue.record(number, [unit(1)])
        assert list(queue.outcomes(number)) == [0, 1]

    @pytest.mark.parametrize("data", [b"no archive", b"PK\x05\x06"])
    def test_an_outcome_of_another_version_is_none(
        self, store: JobStore, data: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its checksum is right, and this version cannot read it."""
        monkeypatch.setattr(outcomes, "log", log := CapturingLogger())
        queue = queue_of(store)
        _, number = claimed(store, queue)
        queue.record(number, [unit(0, data=data)])
        assert queue.outcome(unit(0).key) is None
        assert [(call.args, call.kwargs["key"]) for call in log.calls] == [(("outcome_unreadable",), unit(0).key)]

    def test_the_least_recently_used_leave_and_what_is_needed_stays(self, store: JobStore) -> None:
        queue = queue_of(store)
        _, number = claimed(store, queue)
        queue.record(number, [unit(position) for position in range(4)])
        with store.database.writing() as session:
            for position in range(4):
                used = datetime(2026, 1, 1 + position, tzinfo=UTC)
                session.execute(
                    update(StoredOutcome).where(StoredOutcome.key == unit(position).key).values(used_at=used)
                )
        pruning = Pruning(store.database)
        assert pruning.prune(2 * len(DATA), None) == (0, 0)  # all are needed by an unfinished job
        queue.finish(number, Packed("perplexity", b""))
        _, later = claimed(store, queue)
        queue.record(later, [unit(0, data=None)])
        queue.finish(later, Packed("perplexity", b""))
        assert pruning.prune(2 * len(DATA), None) == (2, 0)
        left = [position for position in range(4) if queue.outcome(unit(position).key) is not None]
        assert left == [0, 3]
        assert pruning.prune(2 * len(DATA), None) == (0, 0)
