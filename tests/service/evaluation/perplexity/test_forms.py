"""A result in the forms that a client accepts: events, JSON, CSV and pictures."""

from __future__ import annotations

import csv
import io
import itertools
import json

import httpx
import pytest

from tests.service.conftest import TEXT


def test_progress_then_result_then_done(client: httpx.Client) -> None:
    body = {"input": TEXT, "methods": [{"method": "default"}, {"method": "alibi"}], "lengths": [512], "stream": True}
    with client.stream("POST", "/perplexity", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    progress = [json.loads(b[6:]) for a, b in itertools.pairwise(lines) if a == "event: progress"]
    done = [p["tokens_done"] for p in progress]
    assert done == sorted(done)
    assert done[-1] == progress[-1]["tokens_total"]
    assert len(done) >= 14
    assert lines[-3] == "event: result"
    assert lines[-1] == "data: [DONE]"
    result = json.loads(lines[-2].removeprefix("data: "))
    assert len(result["methods"]) == 2


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("TEXT/CSV", "text/csv"),
        ("application/json;q=0.5, text/csv", "text/csv"),
        ("text/csv;q=0.1, application/json", "application/json"),
        ("text/csv;q=0, */*", "application/json"),
        ("text/*", "text/csv"),
        ("text/csv;q=0.5, application/*", "application/json"),
        ("*/*, application/json;q=0", "text/csv"),
        ("*/*;q=1, text/*;q=0.2, application/json;q=0.1", "text/csv"),
        ("text/csvx, */*", "application/json"),
        ("text/csv; header=present; Q=0.2, application/json;q=0.1", "text/csv"),
        ("", "application/json"),
        ("image/png, */*;q=0.1", "application/json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "application/json"),
    ],
)
def test_the_client_weighs_csv_against_json(client: httpx.Client, accept: str, kind: str) -> None:
    body = {"input": TEXT, "methods": [{"method": "default"}], "lengths": [64]}
    answer = client.post("/perplexity", json=body, headers={"Accept": accept})
    assert answer.headers["content-type"].split(";")[0] == kind


def test_lines_of_a_header_are_one_list(client: httpx.Client) -> None:
    lines = [("accept", "application/json;q=0.1"), ("accept", "text/csv")]
    sent = httpx.Request(
        "POST", client.base_url.join("/perplexity"), headers=lines, json={"input": TEXT, "lengths": [64]}
    )
    assert client.send(sent).headers["content-type"].startswith("text/csv")


@pytest.mark.parametrize("accept", ["text/csv", "text/csv, application/json", "text/csv, text/event-stream;q=0.5"])
def test_csv_does_not_stream(client: httpx.Client, accept: str) -> None:
    body = {"input": TEXT, "lengths": [64], "stream": True}
    answer = client.post("/perplexity", json=body, headers={"Accept": accept})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "stream")
    assert error["message"] == "stream: must be false with Accept: text/csv, or accept text/event-stream"


@pytest.mark.parametrize("accept", ["*/*", "text/csv, text/event-stream", "application/json, text/csv;q=0.5"])
def test_other_headers_stream(client: httpx.Client, accept: str) -> None:
    body = {"input": TEXT, "lengths": [64], "stream": True}
    answer = client.post("/perplexity", json=body, headers={"Accept": accept})
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    "accept", ["image/png", "application/vnd.apache.parquet", "text/html, image/*;q=0.5", "text/csv;q=0", "*/*;q=0"]
)
def test_other_types_are_not_acceptable(client: httpx.Client, accept: str) -> None:
    """JSON came in their place."""
    answer = client.post("/perplexity", json={"input": TEXT, "lengths": [64]}, headers={"Accept": accept})
    assert (answer.status_code, answer.json()["error"]["code"]) == (406, "not_acceptable")
    assert "application/json, text/csv, or text/event-stream" in answer.json()["error"]["message"]


def test_csv_and_pictures(client: httpx.Client) -> None:
    body = {"input": TEXT, "methods": [{"method": "default"}, {"method": "ntk", "factor": 4}], "lengths": [64, 128]}
    table = client.post("/perplexity", json=body, headers={"Accept": "text/csv"})
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert table.headers["content-type"].startswith("text/csv")
    assert len(rows) == 4
    result = client.post("/perplexity", json=body).json()
    assert float(rows[0]["perplexity"]) == pytest.approx(result["methods"][0]["lengths"][0]["perplexity"], rel=1e-6)
    assert client.get(result["links"]["png"]).content.startswith(b"\x89PNG")
    assert "plotly" in client.get(result["links"]["html"]).text.lower()
    assert client.get(result["links"]["csv"]).text.splitlines()[0] == table.text.splitlines()[0]
    assert client.get(f"/perplexity/{result['id']}").json() == result
    assert client.get("/perplexity/0123").status_code == 404
