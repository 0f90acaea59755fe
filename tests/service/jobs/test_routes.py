"""Jobs over HTTP: from 202 to the report, and what is refused on the way."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from pyarrow import parquet

from service.context import ANONYMOUS
from service.evaluation.catalogue import EVALUATIONS
from service.jobs.storage.store import JobStore
from service.policy.auto import Auto
from tests.service.conftest import TEXT
from tests.service.serving import events_of, serving, wait_for

BODY: dict[str, Any] = {
    "evaluation": "perplexity",
    "input": TEXT[:9000],
    "methods": [{"method": "default"}, {"method": "yarn", "factor": 4.0}],
    "lengths": [64, 128],
}
LONG: dict[str, Any] = BODY | {"input": TEXT, "protocol": "sliding", "stride": 10, "lengths": [64]}
"""Hundreds of windows: seconds of work."""


def submitted(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/jobs", json=BODY | fields)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    assert address_of(answer, behind="/a/prefix") == f"/a/prefix/jobs/{job['id']}"
    return job


def address_of(accepted: httpx.Response, *, behind: str) -> str:
    """The path that its Location leads to, for a client of a proxy that takes the prefix ``behind`` off paths."""
    asked = accepted.request.url
    return asked.copy_with(path=behind + asked.path).join(accepted.headers["location"]).path


def ended(client: httpx.Client, job_id: str) -> dict[str, Any]:
    wait_for(lambda: client.get(f"/jobs/{job_id}").json()["state"] not in ("queued", "running"), 60)
    job: dict[str, Any] = client.get(f"/jobs/{job_id}").json()
    return job


def running(client: httpx.Client) -> dict[str, Any]:
    job = submitted(client, **LONG, reuse=False)
    wait_for(lambda: client.get(f"/jobs/{job['id']}").json()["tokens_done"], 30)
    return job


def test_a_job_gives_what_the_route_gives(client: httpx.Client) -> None:
    job = ended(client, submitted(client)["id"])
    assert (job["state"], job["units_done"], job["units_total"]) == ("done", 2, 2)
    assert job["tokens_done"] == job["tokens_total"]
    direct = client.post("/perplexity", json={name: value for name, value in BODY.items() if name != "evaluation"})
    stored = client.get(job["links"]["results.json"]).json()
    varying = {"id", "seconds", "links"}
    assert {k: v for k, v in stored.items() if k not in varying} == {
        k: v for k, v in direct.json().items() if k not in varying
    }
    assert stored["id"] == job["id"]


def test_every_link_leads_to_what_it_says(client: httpx.Client) -> None:
    job = ended(client, submitted(client)["id"])
    files = {name: client.get(link) for name, link in job["links"].items()}
    assert set(files) == {
        "events",
        "units.json",
        "units.csv",
        "results.json",
        "results.csv",
        "results.parquet",
        "report.html",
        "plot.png",
        "plot.svg",
        "figures.json",
    }
    assert all(answer.status_code == 200 for answer in files.values())
    result = files["results.json"].json()
    rows = list(csv.DictReader(io.StringIO(files["results.csv"].text)))
    table = parquet.read_table(io.BytesIO(files["results.parquet"].content)).to_pylist()
    perplexities = [at["perplexity"] for method in result["methods"] for at in method["lengths"]]
    assert [float(row["perplexity"]) for row in rows] == perplexities
    assert [row["perplexity"] for row in table] == perplexities
    assert Image.open(io.BytesIO(files["plot.png"].content)).format == "PNG"
    page = files["report.html"]
    assert "yarn(factor=4)" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert '<a href="results.csv">' in page.text


@pytest.mark.parametrize("at_once", [False, True])
def test_every_picture_can_be_asked_for_by_its_name(client: httpx.Client, at_once: bool) -> None:
    if at_once:
        body = {name: value for name, value in BODY.items() if name != "evaluation"}
        links = client.post("/perplexity", json=body).json()["links"]
        png, svg, page = links["png"], links["svg"], links["html"]
        assert "perplexity" in client.get(page).text
        assert "NLL by position" in client.get(page, params={"picture": "nll-by-position"}).text
    else:
        links = ended(client, submitted(client)["id"])["links"]
        png, svg = links["plot.png"], links["plot.svg"]
        names = [figure["name"] for figure in client.get(links["figures.json"]).json()["figures"]]
        assert names == ["perplexity", "nll-by-position", "change"]
    first, second = (client.get(svg, params=query) for query in ({}, {"picture": "nll-by-position"}))
    assert first.headers["content-type"] == "image/svg+xml"
    assert "default-src 'none'" in first.headers["content-security-policy"]
    assert "Perplexity by context length" in first.text
    assert "NLL by position" in second.text
    assert client.get(png).content != client.get(png, params={"picture": "nll-by-position"}).content
    for file in (png, svg):
        answer = client.get(file, params={"picture": "nll"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "picture")
        assert "the result has perplexity, nll-by-position" in answer.json()["error"]["message"]


def test_a_report_has_the_text_only_on_request(client: httpx.Client) -> None:
    job = ended(client, submitted(client)["id"])
    report = job["links"]["report.html"]
    assert TEXT[:60] not in client.get(report).text
    assert TEXT[:60] in client.get(report, params={"include_text": "true"}).text
    events = client.get(f"/jobs/{job['id']}/results.json").text
    assert TEXT[:60] not in events


def test_a_report_can_leave_the_server(client: httpx.Client) -> None:
    job = ended(client, submitted(client)["id"])
    small, whole = (client.get(job["links"]["report.html"], params={"standalone": wanted}) for wanted in (False, True))
    assert "plotly.js v" not in small.text
    assert "plotly.js v" in whole.text
    assert "<script src=" not in whole.text
    assert "<script src=" in small.text
    assert len(small.content) < len(whole.content) - 4_000_000


@pytest.mark.parametrize("evaluation", ["perplexity", "long_perplexity"])
def test_background_on_a_route_makes_a_job(client: httpx.Client, evaluation: str) -> None:
    body = {name: value for name, value in BODY.items() if name != "evaluation"}
    answer = client.post(f"/{evaluation}", json=body | {"background": True})
    assert answer.status_code == 202
    assert address_of(answer, behind="") == f"/jobs/{answer.json()['id']}"
    job = ended(client, answer.json()["id"])
    assert (job["state"], job["evaluation"]) == ("done", evaluation)


def test_events_tell_every_unit_once_and_go_on_after_the_last_that_was_seen(client: httpx.Client) -> None:
    job = submitted(client, reuse=False)
    with client.stream("GET", f"/jobs/{job['id']}/events") as answer:
        told = events_of(answer)
    units = [data for name, data in told if name == "unit"]
    assert [unit["number"] for unit in units] == [1, 2]
    assert [unit["label"] for unit in units] == ["default", "yarn(factor=4)"]
    assert all(unit["summary"]["nll_mean"] > 0 and not unit["reused"] for unit in units)
    assert told[-1][0] == "job"
    assert told[-1][1]["state"] == "done"
    with client.stream("GET", f"/jobs/{job['id']}/events", headers={"Last-Event-ID": "1"}) as answer:
        again = events_of(answer)
    assert [data["number"] for name, data in again if name == "unit"] == [2]


def test_a_submission_that_is_sent_again_makes_no_second_job(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(key: str, **fields: Any) -> httpx.Response:
        return client.post("/jobs", json=BODY | fields, headers={"Idempotency-Key": key})

    first, again = send("once"), send("once")
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    body = {name: value for name, value in BODY.items() if name != "evaluation"} | {"background": True}
    at_the_route = client.post("/perplexity", json=body, headers={"Idempotency-Key": "there"})
    assert at_the_route.status_code == 202
    at_once = client.post("/perplexity", json=body | {"background": False}, headers={"Idempotency-Key": "there"})
    assert "send it with background" in at_once.json()["error"]["message"]
    assert at_once.json()["error"]["param"] == "Idempotency-Key"
    assert at_once.status_code == 400
    for refused, status in (
        (send("once", lengths=[64]), 422),
        (send(""), 400),
        (send("k" * 256), 400),
        (send("a b"), 400),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, "Idempotency-Key")
    told = send("a b").json()["error"]["message"]
    assert told == "Idempotency-Key: must have printable characters of ASCII, and no blanks, not 'a b'"
    made = send("auto", methods=["auto"]).json()
    other = Auto.model_validate({"ranges": [{"up_to": None, "pe": "none"}], "origin": {"source": "rule"}})
    assert made["request"]["methods"][0]["ranges"] != other.model_dump()["ranges"]
    monkeypatch.setattr("service.api.encodings.auto.auto_by_rule", lambda served: other)
    assert send("auto", methods=["auto"]).json()["id"] == made["id"], "whatever auto has come to mean"


def test_what_a_job_waits_for_is_said(client: httpx.Client, checkpoints: Path, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'jobs.db'}"
    store = JobStore(database)
    request = EVALUATIONS["perplexity"].request.model_validate(BODY)
    waiting = store.add(ANONYMOUS, request, models=["tiny", "elsewhere"], units=1, tokens=1)
    store.close()
    with serving(checkpoints, database_url=database) as (url, _):
        told = httpx.get(f"{url}/jobs/{waiting.id}").json()
        assert (told["state"], told["models"], told["not_served"]) == ("queued", ["elsewhere", "tiny"], ["elsewhere"])
        ended_ = httpx.delete(f"{url}/jobs/{waiting.id}").json()
        assert (ended_["state"], ended_["not_served"]) == ("cancelled", [])


def test_a_running_job_is_cancelled_and_an_ended_one_forgotten(client: httpx.Client) -> None:
    job = running(client)
    kept = client.delete(f"/jobs/{job['id']}?forget=true")
    assert (kept.status_code, kept.json()["error"]["code"]) == (409, "job_unfinished")
    early = client.get(f"/jobs/{job['id']}/results.json")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "job_running")
    assert client.delete(f"/jobs/{job['id']}").json()["state"] == "cancelled"
    gone = client.get(f"/jobs/{job['id']}/results.json")
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "job_cancelled")
    assert client.delete(f"/jobs/{job['id']}").json()["state"] == "cancelled", "again is no harm"
    assert client.delete(f"/jobs/{job['id']}?forget=true").status_code == 204
    assert client.get(f"/jobs/{job['id']}").status_code == 404


def test_jobs_are_listed_newest_first_and_page_by_page(client: httpx.Client) -> None:
    ids = [submitted(client)["id"] for _ in range(3)]
    for job_id in ids:
        ended(client, job_id)
    first = [job["id"] for job in client.get("/jobs?limit=2").json()["jobs"]]
    assert first == [ids[2], ids[1]]
    rest = [job["id"] for job in client.get(f"/jobs?limit=1&before={first[-1]}").json()["jobs"]]
    assert rest == [ids[0]]
    assert {job["state"] for job in client.get("/jobs?state=done").json()["jobs"]} == {"done"}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"stream": True}, 400, "stream"),
        ({"timeout_s": 5.0}, 400, "timeout_s"),
        ({"lengths": [1 << 20]}, 400, "lengths"),
        ({"evaluation": "nonsense"}, 400, "evaluation"),
        ({"model": "nonsense"}, 404, "model"),
        ({"methods": [{"method": "yarn"}]}, 400, "methods.0"),
        ({"depths": [0.5]}, 400, "depths"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(
    client: httpx.Client, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = client.post("/jobs", json=BODY | fields)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "path", ["", "/events", "/results.json", "/results.csv", "/plot.png", "/plot.svg", "/report.html"]
)
def test_unknown_jobs_are_404(client: httpx.Client, path: str) -> None:
    for given, says in (("nonsense", "nonsense: a whole id has 32 characters"), ("0" * 32, "0" * 32)):
        answer = client.get(f"/jobs/{given}{path}")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (404, "not_found", f"no such job: {says}")


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 19, "9" * 5000, b"\xb2"])
def test_a_last_event_that_is_no_number_is_refused(client: httpx.Client, last: Any) -> None:
    answer = client.get(f"/jobs/{submitted(client)['id']}/events", headers={"Last-Event-ID": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_what_only_a_job_can_do_is_refused_where_the_answer_is_waited_for(client: httpx.Client) -> None:
    body = {name: value for name, value in BODY.items() if name != "evaluation"}
    for reuse in (True, False):
        answer = client.post("/perplexity", json=body | {"reuse": reuse})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reuse")
        assert client.post("/perplexity", json=body | {"reuse": reuse, "background": True}).status_code == 202


def test_another_key_sees_nothing_of_a_job(checkpoints: Path, tmp_path: Path) -> None:
    ann, bob = ({"Authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    database = f"sqlite:///{tmp_path / 'jobs.db'}"
    with (
        serving(checkpoints, api_keys="ann,bob", max_jobs=1, database_url=database) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        job = client.post("/jobs", json=LONG, headers=ann).json()["id"]
        assert client.get("/jobs", headers=bob).json() == {"jobs": []}
        files = ("events", "results.json", "units.json", "units.csv")
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/resume"),
            *(("GET", f"/{file}") for file in files),
        ):
            assert client.request(method, f"/jobs/{job}{path}", headers=bob).status_code == 404, path
        refused = client.post("/jobs", json=BODY, headers=ann)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_jobs")
        assert client.post("/jobs", json=BODY, headers=bob).status_code == 202
        assert client.delete(f"/jobs/{job}", headers=ann).json()["state"] == "cancelled"


def test_every_evaluation_has_a_route_and_an_example_that_parses(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for name, evaluation in EVALUATIONS.items():
        assert f"/{name}" in document["paths"]
        assert evaluation.request.model_validate(evaluation.request.example()).evaluation == name
        assert evaluation.result.model_fields["evaluation"].default == name
