"""Jobs that end before they are done: what is finished stays readable, and they go on where they were."""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from sqlalchemy import update

from service.api.jobs import partial
from service.api.jobs.lookup import stored_job
from service.evaluation.cost import Cost
from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.database.tables import Job
from service.jobs.planning import body_of
from service.jobs.records import AtWork
from service.jobs.storage import measured
from service.jobs.storage.claims import Recorded
from service.jobs.storage.refusals import JobDone, UnknownJob
from service.jobs.storage.results import Packed
from service.jobs.storage.store import JobStore
from tests.service.conftest import TEXT
from tests.service.jobs.adding import claimed, queue_of, unit
from tests.service.serving import serving, wait_for

LONG: dict[str, Any] = {
    "evaluation": "perplexity",
    "input": TEXT[:6000],
    "methods": [{"method": "default"}, {"method": "yarn", "factor": 4.0}, {"method": "linear", "factor": 2.0}],
    "protocol": "sliding",
    "stride": 16,
    "lengths": [64],
    "reuse": False,
}
"""Three units of a hundred windows and more."""

TWO = [TEXT[:3000], TEXT[3000:6000]]

STAGED = [{"method": "yarn", "factor": factor} for factor in (1.0, 1.5, 2.0, 2.5, 3.0)]
"""Candidates of a recommendation in several rounds."""

PACKED = Packed("perplexity", gzip.compress(b"packed"))


def submitted(client: httpx.Client, **fields: Any) -> str:
    answer = client.post("/jobs", json=LONG | fields)
    assert answer.status_code == 202, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def job(client: httpx.Client, job_id: str) -> dict[str, Any]:
    told: dict[str, Any] = client.get(f"/jobs/{job_id}").json()
    return told


def cancelled(client: httpx.Client, *, units: int, **fields: Any) -> str:
    """A job that was cancelled while its next unit was at work."""
    job_id = submitted(client, **fields)
    wait_for(lambda: job(client, job_id)["units_done"] >= units, 60)
    assert client.delete(f"/jobs/{job_id}").json()["state"] == "cancelled"
    return job_id


def done(client: httpx.Client, job_id: str) -> dict[str, Any]:
    wait_for(lambda: job(client, job_id)["state"] not in ("queued", "running"), 90)
    return job(client, job_id)


def result_of(client: httpx.Client, job_id: str) -> dict[str, Any]:
    answer = client.get(f"/jobs/{job_id}/results.json")
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_the_methods_that_are_complete_are_the_result(client: httpx.Client) -> None:
    job_id = cancelled(client, units=1)
    told = job(client, job_id)
    assert {"results.json", "units.csv"} <= told["links"].keys()
    assert [client.get(link).status_code for link in told["links"].values()] == [200] * 10
    result = result_of(client, job_id)
    finished = told["units_done"]
    assert result["partial"]["units_done"] == finished < result["partial"]["units_total"] == 3
    labels = ["default", "yarn(factor=4)", "linear(factor=2)"]
    assert [method["label"] for method in result["methods"]] == labels[:finished]
    assert result["partial"]["missing"] == dict.fromkeys(labels[finished:], 1)
    alone = {name: value for name, value in LONG.items() if name not in ("evaluation", "reuse")}
    whole = client.post("/perplexity", json=alone | {"methods": LONG["methods"][:finished]}).json()
    assert result["methods"] == whole["methods"], "to the bit"
    assert result_of(client, job_id) == result, "it was kept"
    rows = list(csv.DictReader(io.StringIO(client.get(f"/jobs/{job_id}/results.csv").text)))
    assert {row["method"] for row in rows} == set(labels[:finished])
    assert result["partial"]["lacks"] == ["methods"]
    page = client.get(f"/jobs/{job_id}/report.html").text
    assert "Of the methods that finished: At 64 tokens" in page
    missing = ", ".join(f"{label} (1)" for label in labels[finished:])
    assert f"{finished} of 3 units are finished; missing: {missing}" in page


def test_the_finished_units_are_a_table_in_any_state(client: httpx.Client) -> None:
    job_id = cancelled(client, units=1)
    units = client.get(f"/jobs/{job_id}/units.json").json()["units"]
    rows = list(csv.DictReader(io.StringIO(client.get(f"/jobs/{job_id}/units.csv").text)))
    assert len(units) == len(rows) == job(client, job_id)["units_done"]
    assert [float(row["nll_mean"]) for row in rows] == [unit["summary"]["nll_mean"] for unit in units]
    assert client.get("/jobs/nonsense/units.json").status_code == 404


def test_a_job_without_a_complete_method_points_to_its_units(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, read = list[str](), measured.read
    monkeypatch.setattr(measured, "read", lambda *args: looks.append(args[2]) or read(*args))
    several = {"methods": LONG["methods"][:1], "input": [TEXT[n : n + 6000] for n in range(3)]}
    job_id = cancelled(client, units=1, **several)
    links = job(client, job_id)["links"]
    assert links.keys() == {"events", "units.json", "units.csv"}, "no file that is refused"
    assert job(client, job_id)["links"] == links
    answer = client.get(f"/jobs/{job_id}/results.json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_cancelled")
    message = answer.json()["error"]["message"]
    assert "finished units are in units.json" in message
    assert "no method that is complete by the code and the weights of this server" in message
    assert len(client.get(f"/jobs/{job_id}/units.json").json()["units"]) == job(client, job_id)["units_done"]
    assert looks == [job_id], "the decision is made once"


def test_a_cancelled_job_goes_on_where_it_was(client: httpx.Client) -> None:
    job_id = cancelled(client, units=1)
    partial = result_of(client, job_id)
    finished = client.get(f"/jobs/{job_id}/units.json").json()["units"]
    answer = client.post(f"/jobs/{job_id}/resume")
    assert (answer.status_code, answer.headers["location"]) == (202, f"../../jobs/{job_id}")
    assert (answer.json()["state"], answer.json()["finished_at"]) == ("queued", None)
    assert done(client, job_id)["state"] == "done"
    units = client.get(f"/jobs/{job_id}/units.json").json()["units"]
    assert units[: len(finished)] == finished, "nothing was measured again"
    result = result_of(client, job_id)
    assert (result["partial"], len(result["methods"])) == (None, 3)
    assert result["methods"][: len(partial["methods"])] == partial["methods"]
    rows = csv.DictReader(io.StringIO(client.get(f"/jobs/{job_id}/results.csv").text))
    assert len({row["method"] for row in rows}) == 3, "the partial file is not given out again"
    refused = client.post(f"/jobs/{job_id}/resume")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_done")


@pytest.mark.parametrize("changed", [{"newer": 1}, {"evaluation": "newer"}])
def test_a_job_of_another_version_has_no_partial_result(checkpoints: Path, changed: dict[str, Any]) -> None:
    """After a rollback, each look at the job, and its end, was a 500."""
    stored = body_of(PerplexityRequest.model_validate(LONG)) | changed
    with serving(checkpoints) as (url, app), httpx.Client(base_url=url, timeout=60) as client:
        job_id = submitted(client)
        wait_for(lambda: job(client, job_id)["units_done"] >= 1, 60)
        with app.state.jobs.database.writing() as session:
            session.execute(update(Job).where(Job.id == job_id).values(request=stored))
        assert client.delete(f"/jobs/{job_id}").json()["state"] == "cancelled"
        assert job(client, job_id)["links"].keys() == {"events", "units.json", "units.csv"}
        answer = client.get(f"/jobs/{job_id}/results.json")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_cancelled")
        assert client.post(f"/jobs/{job_id}/resume").status_code == 202
        failed = done(client, job_id)
        assert (failed["state"], "version" in failed["error"]["message"]) == ("failed", True)
        assert client.delete(f"/jobs/{job_id}", params={"forget": True}).status_code == 204


def test_resuming_what_has_not_ended_changes_nothing(client: httpx.Client) -> None:
    job_id = submitted(client)
    assert client.post(f"/jobs/{job_id}/resume").json()["state"] in ("queued", "running")
    client.delete(f"/jobs/{job_id}")
    assert client.post("/jobs/nonsense/resume").status_code == 404


def test_who_may_have_no_more_jobs_resumes_none(checkpoints: Path) -> None:
    with serving(checkpoints, max_jobs=1) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        job_id = submitted(client)
        client.delete(f"/jobs/{job_id}")
        other = submitted(client)
        refused = client.post(f"/jobs/{job_id}/resume")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_jobs")
        client.delete(f"/jobs/{other}")
        assert client.post(f"/jobs/{job_id}/resume").status_code == 202
        client.delete(f"/jobs/{job_id}")


class TestStore:
    def test_a_failed_job_is_queued_as_if_it_had_never_failed(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.record(number, [unit(0), unit(1)])
        assert queue.fail(number, "out_of_memory", "too large")
        resumed = store.resume("anna", job.id)
        assert (resumed.state, resumed.error, resumed.units_done) == ("queued", None, 2)
        assert queue.claim(number) is not None
        queue.begin(number, [f"{position:064}" for position in range(6)], Cost(384, 6, 6))
        assert [done.number for done in store.done_units(job.id)] == [1, 2]

    def test_only_its_owner_resumes_a_job_and_only_once_it_has_ended(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        assert store.resume("anna", job.id).state == "running"
        store.cancel("anna", job.id)
        with pytest.raises(UnknownJob):
            store.resume("bert", job.id)
        assert store.resume("anna", job.id).state == "queued"
        assert queue.record(number, [unit(0)]) is Recorded.LOST, "its previous owner has lost it"

    def test_the_unread_tokens_of_a_job_move_once(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        queue.record(number, [unit(0)])
        store.in_flight[job.id] = {1: AtWork(20, 0.0)}
        read = store.get("anna", job.id).tokens_done
        moved = [store.cancel("anna", job.id).tokens_moved for _ in range(2)]
        assert moved == [384 - read, 0], "units at work have read their tokens"
        moved = [store.resume("anna", job.id).tokens_moved for _ in range(2)]
        assert moved == [384 - read + 20, 0], "they begin again"

    def test_only_the_last_end_of_a_job_keeps_its_partial_result(self, store: JobStore) -> None:
        queue, ends = queue_of(store), []
        job, number = claimed(store, queue)
        for position, finished in enumerate(("a", "b")):
            queue.record(number, [unit(position)])
            store.cancel("anna", job.id)
            ended = measured.read(store.database, "anna", job.id)
            assert ended is not None
            ends.append((ended, PACKED._replace(evaluation=finished)))
            if finished == "a":
                store.resume("anna", job.id)
                assert queue.claim(number) is not None
        for ended, packed in ends:
            measured.put(store.database, ended, packed)
        kept = store.result("anna", job.id)
        assert kept is not None
        assert kept.evaluation == "b"

    def test_a_job_that_is_done_stays_done(self, store: JobStore) -> None:
        queue = queue_of(store)
        job, number = claimed(store, queue)
        assert queue.finish(number, PACKED)
        with pytest.raises(JobDone):
            store.resume("anna", job.id)
        assert store.result("anna", job.id) == PACKED


def test_a_running_job_has_figures_of_its_complete_methods(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_running = partial.of_running

    async def slow(job_id: str, request: Request) -> Packed | None:
        """The job ends before its partial result is drawn."""
        found = await of_running(job_id, request)
        while (await stored_job(job_id, request)).state == "running":
            await asyncio.sleep(0.02)
        return found

    job_id = submitted(client, input=TEXT)
    assert client.get(f"/jobs/{job_id}/figures.json").status_code in (200, 409)
    wait_for(lambda: job(client, job_id)["units_done"] >= 1, 60)
    assert client.get(f"/jobs/{job_id}/results.json").status_code == 409, "a result is whole or its job has ended"
    monkeypatch.setattr(partial, "of_running", slow)
    figures = client.get(f"/jobs/{job_id}/figures.json").json()
    assert figures["partial"]["units_done"] in (1, 2)
    assert len(figures["partial"]["missing"]) == 3 - figures["partial"]["units_done"]
    assert done(client, job_id)["state"] == "done"
    whole = client.get(f"/jobs/{job_id}/figures.json").json()
    assert whole["partial"] is None
    assert whole["words"] == figures["words"] or len(whole["figures"][0]["data"]) > len(figures["figures"][0]["data"])


def test_a_plan_is_that_of_the_job(client: httpx.Client) -> None:
    planned = client.post("/jobs/plan", json=LONG).json()
    made = job(client, submitted(client))
    client.delete(f"/jobs/{made['id']}")
    assert planned == {"units": made["units_total"], "tokens": made["tokens_total"]}
    staged = {"evaluation": "recommend", "input": TEXT[:9000], "length": 128, "windows": 4, "methods": STAGED}
    bound = client.post("/jobs/plan", json=staged).json()
    made = job(client, client.post("/jobs", json=staged).json()["id"])
    ended = done(client, made["id"])
    assert made["units_total"] == bound["units"] >= ended["units_total"] == ended["units_done"]
    refused = client.post("/jobs/plan", json=LONG | {"methods": ["yarm"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "methods.0")
