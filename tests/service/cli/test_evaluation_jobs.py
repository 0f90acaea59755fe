"""Evaluations as jobs of a live server: found again, shown, read as results, cancelled and forgotten."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from pathlib import Path

import httpx
import pytest
from pyarrow import parquet

from service.cli.jobs import jobs
from service.client import Ropeway
from service.client.requests import DEFAULT_URL
from tests.service.cli.conftest import DOCUMENT
from tests.service.cli.shell import ropeway, succeeded


@pytest.fixture
def done(server: str) -> str:
    with Ropeway(server) as client:
        job = client.submit("perplexity", input=DOCUMENT, methods=["default", "yarn:4"], lengths=[64, 128])
        *_, last = client.follow(job.id)
    assert getattr(last, "state", None) == "done"
    return job.id


@pytest.mark.parametrize("name", ["perplexity", "long-perplexity"])
def test_a_job_in_the_background_is_found_again(server: str, text: str, name: str) -> None:
    job_id = succeeded(name, text, "--lengths", "64", "--server", server, "--background").strip()
    assert (
        name.replace("-", "_") == json.loads(succeeded("jobs", "show", job_id[:16], "--server", server))["evaluation"]
    )
    assert job_id[:12] in succeeded("jobs", "list", "--server", server)
    assert "64" in succeeded("jobs", "follow", job_id, "--server", server)
    for state, listed in (("done", True), ("failed", False)):
        assert (job_id[:12] in succeeded("jobs", "list", "--state", state, "--server", server)) is listed


def test_a_job_is_shown_without_its_texts_unless_they_are_asked_for(server: str, done: str) -> None:
    shown = succeeded("jobs", "show", done, "--server", server)
    size, digest = len(DOCUMENT.encode()), hashlib.sha256(DOCUMENT.encode()).hexdigest()
    document = {"name": "input", "characters": len(DOCUMENT), "bytes": size, "sha256": digest}
    assert json.loads(shown)["request"]["input"] == document
    assert DOCUMENT[:40] not in shown
    whole = json.loads(succeeded("jobs", "show", done, "--server", server, "--json"))
    assert whole["request"]["input"] == DOCUMENT
    assert json.loads(shown) | {"request": None} == whole | {"request": None}


def test_a_job_has_the_names_of_the_files(server: str, text: str, tmp_path: Path) -> None:
    other, page = tmp_path / "other.txt", tmp_path / "page.html"
    other.write_text(DOCUMENT[::-1])
    given = (text, str(other), "--lengths", "64", "--server", server)
    job_id = succeeded("perplexity", *given, "--background").strip()
    assert "other.txt" in succeeded("jobs", "follow", job_id, "--server", server)
    asked = json.loads(succeeded("jobs", "show", job_id, "--server", server))["request"]["input"]
    assert [document["name"] for document in asked] == [Path(text).name, "other.txt"]
    succeeded("report", job_id, "--server", server, "--output", str(page))
    assert f" tokens: {Path(text).name}, other.txt" in page.read_text()
    with Ropeway(server) as client:
        assert {unit.name for unit in client.units(job_id)} == {Path(text).name, "other.txt"}


def test_results_of_a_job(server: str, done: str, tmp_path: Path) -> None:
    shown = succeeded("jobs", "results", done, "--server", server)
    assert "yarn(factor=4)" in shown
    rows = list(csv.DictReader(io.StringIO(succeeded("jobs", "results", done, "--server", server, "--csv"))))
    table = tmp_path / "table.parquet"
    succeeded("jobs", "results", done, "--server", server, "--parquet", str(table))
    assert parquet.read_table(table).column("perplexity").to_pylist() == [float(row["perplexity"]) for row in rows]
    page = tmp_path / "page.html"
    succeeded("report", done, "-o", str(page), "--server", server)
    refused = ropeway("report", done, "-o", str(page.with_suffix(".pdf")), "--server", server)
    told = " ".join(refused.stderr.replace("│", "").split())
    assert (refused.exit_code, "must end in .html" in told) == (2, True)
    assert "yarn(factor=4)" in page.read_text()


@pytest.mark.parametrize(
    "options", [("--json", "--csv"), ("--parquet", "table.parquet", "--json"), ("--parquet", "table.parquet", "--csv")]
)
def test_results_have_one_format(options: tuple[str, ...]) -> None:
    result = ropeway("jobs", "results", "0123", *options, "--server", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert f"{options[0]} and {options[-1]} exclude each other" in result.stderr


@pytest.mark.parametrize("job_id", ["", "../health", "0123?forget=true", "JOB"])
def test_an_id_that_is_none_is_refused(job_id: str) -> None:
    """It would name another route of the server."""
    result = ropeway("jobs", "cancel", job_id, "--server", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert f"{job_id!r} is no id" in result.stderr


def test_help_names_the_server_of_jobs() -> None:
    for command in (["jobs", "list"], ["report"]):
        shown = " ".join(succeeded(*command, "--help").replace("│", "").split())
        assert f"[default: (ROPEWAY_URL, or {DEFAULT_URL})]" in shown
    assert all(str(command.name) in str(jobs.info.help) for command in jobs.registered_commands)


def test_a_job_is_cancelled_and_forgotten(server: str, done: str) -> None:
    told = succeeded("jobs", "cancel", done, "--server", server)
    assert told == f"{done[:12]} is done already: there is nothing to cancel\n"
    assert json.loads(succeeded("jobs", "show", done, "--server", server))["state"] == "done", "it had ended"
    succeeded("jobs", "forget", done, "--server", server)
    result = ropeway("jobs", "show", done, "--server", server)
    assert result.exit_code == 1
    assert "no such job" in result.output


def test_jobs_are_those_of_the_server_that_the_environment_names(
    server: str, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_URL", server)
    assert done[:12] in succeeded("jobs", "list")
    with Ropeway(server) as client:
        newer = client.submit("perplexity", input=DOCUMENT, lengths=[64]).id
    short = ropeway("jobs", "list", "--limit", "1")
    assert (newer[:12] in short.stdout, done[:12] in short.stdout) == (True, False)
    assert "there are more than these 1: --limit shows them" in short.stderr
    assert not ropeway("jobs", "list", "--limit", "1000").stderr
    assert httpx.get(f"{server}/jobs/{done}").status_code == 200
