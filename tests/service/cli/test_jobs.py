"""Jobs in the shell: watched, left alone, cancelled, resumed, and read although they ended early."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer

from service.cli.shared import progress
from service.cli.shared.following import finding_again
from service.cli.shared.terminal import stdout
from service.client import JobInfo, Ropeway, UnitDone
from tests.conftest import ROOT
from tests.forks.parent import SERVERS
from tests.forks.process import fork, forked
from tests.service.cli.shell import ropeway
from tests.service.conftest import TEXT
from tests.service.serving import command, serving, wait_for

LONG: dict[str, Any] = {"input": TEXT[:12_000], "methods": ["default", "yarn:4"], "lengths": [64], "reuse": False}
LONG |= {"protocol": "sliding", "stride": 12}
"""Two units of hundreds of windows."""


@pytest.fixture(scope="module")
def server(checkpoints: Path) -> Iterator[str]:
    """One that takes jobs of minutes."""
    with serving(checkpoints, max_scored_tokens=100_000_000) as (url, _):
        yield url


@pytest.fixture
def client(server: str) -> Iterator[Ropeway]:
    with Ropeway(server) as client:
        yield client


def reporting_at_once(arguments: list[str]) -> None:
    """`ropeway`, whose first line of progress comes seconds earlier, while a server computes in vain."""
    progress.LINE_S = progress.MEASURED_S = 0.0
    command(arguments)


def interrupted(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command in another process that gets Ctrl-C once it has reported progress."""
    log = folder / "stderr"
    with open(os.devnull, "r+b") as nothing, log.open("wb") as errors, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        streams = (nothing.fileno(), nothing.fileno(), errors.fileno())
        running = fork(SERVERS, reporting_at_once, (list(arguments),), ROOT, streams)
    try:
        wait_for(lambda: "\n" in log.read_text() or running.poll() is not None, 60)
        running.send_signal(signal.SIGINT)
        return running.wait(30), log.read_text()
    finally:
        running.kill()


@pytest.fixture
def endless(client: Ropeway) -> Iterator[str]:
    """A job of many units that no client waits for."""
    many = LONG | {"input": [TEXT[n : n + 5_000] for n in range(60)], "methods": ["default"]}
    job_id = client.submit("perplexity", **many).id
    yield job_id
    client.cancel(job_id)


def test_jobs_before_it_are_named(server: str, client: Ropeway, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they end there is nothing to show."""
    wait_for(lambda: client.job(endless).state == "running")
    job = client.submit("perplexity", **LONG)

    def cancelled(other: Ropeway, job_id: str) -> Iterator[JobInfo]:
        yield other.job(job_id)
        other.cancel(job_id)
        yield other.job(job_id)

    monkeypatch.setattr(Ropeway, "follow", cancelled)
    shown = ropeway("jobs", "follow", job.id, "--server", server)
    line = f"job {job.id[:12]} waits; unfinished jobs before it: 1, the first {endless[:12]}"
    assert shown.stderr.splitlines()[0] == line
    assert "the job was cancelled" in shown.stderr


def test_the_list_has_the_encodings_of_long_documents_too(server: str, client: Ropeway) -> None:
    methods = ["default", "yarn:4", "ntk:2", "auto", "linear:3"]
    job = client.submit("perplexity", input="many words " * 2000, lengths=[64], methods=methods, max_tokens=128)
    shown = ropeway("jobs", "list", "--limit", "1", "--server", server)
    client.cancel(job.id)
    assert job.id[:12] in shown.stdout
    assert "default, yarn(factor=4)" in shown.stdout
    assert "and 2 more" in shown.stdout


def listed(server: str, job: JobInfo) -> str:
    """The table of the newest job, which it ends."""
    shown = ropeway("jobs", "list", "--limit", "1", "--server", server)
    with Ropeway(server) as client:
        client.cancel(job.id)
    assert job.id[:12] in shown.stdout
    return shown.stdout


def test_the_list_has_the_encodings_of_jobs_that_name_none(server: str, client: Ropeway) -> None:
    fields = {"input": TEXT[:2000], "max_tokens": 128}
    assert "default" in listed(server, client.submit("perplexity", lengths=[64], **fields))
    assert "proposed" in listed(server, client.submit("recommend", length=64, windows=2, **fields))
    search = client.submit("search", length=66, windows=1, held_out=3, input=TEXT[:2000])
    assert "proposed" in listed(server, search)
    client.forget(search.id)  # listings of other tests have at most 20


def test_the_list_knows_no_encodings_of_long_requests(
    server: str, client: Ropeway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings have no request that is long without its documents."""
    job = client.submit("perplexity", input=TEXT[:2000], methods=["yarn:4"], lengths=[64], max_tokens=128)
    monkeypatch.setattr(Ropeway, "jobs", lambda *_, **__: [job.model_copy(update={"request": {}})])
    assert "default" not in listed(server, job)


def test_encodings_stay_whole_at_80_columns(server: str, client: Ropeway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "_width", 80)
    fields = {"input": TEXT[:2000], "lengths": [64], "max_tokens": 128}
    methods = ["linear:16", "self_extend:group_size=4"]
    shown = listed(server, client.submit("perplexity", methods=methods, **fields))
    assert "linear(factor=16)," in shown
    assert re.search(r"\d{4}-\d\d-\d\d", shown)
    assert all(len(line) <= 80 for line in shown.splitlines())


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_alone(server: str, client: Ropeway, endless: str, tmp_path: Path) -> None:
    code, stderr = interrupted(tmp_path, "jobs", "follow", endless, "--server", server)
    assert code == 130
    assert f"come back to it: ropeway jobs follow {endless[:12]} --server {server}" in stderr
    assert "Traceback" not in stderr
    assert client.job(endless).state == "running"


@pytest.mark.slow
def test_ctrl_c_cancels_where_that_is_asked_for(server: str, client: Ropeway, endless: str, tmp_path: Path) -> None:
    code, stderr = interrupted(tmp_path, "jobs", "follow", endless, "--cancel", "--server", server)
    assert code == 130
    assert stderr.splitlines()[-1].startswith("cancelled")
    assert client.job(endless).state == "cancelled"


@pytest.fixture
def cancelled(client: Ropeway) -> str:
    """A job of two methods that was cancelled after the first."""
    job = client.submit("perplexity", **LONG)
    items = client.follow(job.id)
    assert any(isinstance(item, UnitDone) for item in items)
    items.close()
    client.cancel(job.id)
    return job.id


@pytest.mark.slow
def test_a_job_that_ended_early_is_read_and_goes_on(server: str, client: Ropeway, cancelled: str) -> None:
    shown = ropeway("jobs", "results", cancelled, "--server", server)
    assert shown.exit_code == 0, shown.output
    assert "partial: 1 of 2 units are finished; missing: yarn(factor=4) (1)" in shown.stderr
    assert "default" in shown.stdout
    assert "yarn" not in shown.stdout
    resumed = ropeway("jobs", "resume", cancelled[:16], "--server", server)
    assert "queued; 1 of 2 units are finished, and are not repeated unless" in resumed.stdout
    followed = ropeway("jobs", "follow", cancelled, "--server", server)
    assert followed.exit_code == 0, followed.output
    assert "yarn(factor=4)" in followed.stdout
    again = ropeway("jobs", "resume", cancelled, "--server", server)
    assert (again.exit_code, "nothing to resume" in again.stderr) == (1, True)


@pytest.mark.slow
def test_a_job_without_a_complete_method_shows_its_units(server: str, client: Ropeway, endless: str) -> None:
    wait_for(lambda: client.job(endless).units_done, 60)
    ended = ropeway("jobs", "cancel", endless, "--server", server)
    done = client.job(endless).units_done
    assert ended.stdout == f"{endless[:12]} is cancelled; {done} of 60 units are finished\n"
    followed = ropeway("jobs", "follow", endless, "--server", server)
    assert followed.exit_code == 1
    assert "error: the job was cancelled; " in followed.stderr
    told = f"{done} of 60 units are finished: ropeway jobs results {endless[:12]} --server {server} shows them"
    assert told in " ".join(followed.stderr.split())
    shown = ropeway("jobs", "results", endless, "--server", server)
    assert (shown.exit_code, shown.stdout.count("input[")) == (0, done)
    assert "these are its finished units" in shown.stderr
    assert len(json.loads(ropeway("jobs", "results", endless, "--server", server, "--json").stdout)) == done
    rows = list(csv.DictReader(io.StringIO(ropeway("jobs", "results", endless, "--server", server, "--csv").stdout)))
    assert len(rows) == done


@pytest.mark.slow
def test_ctrl_c_without_a_server_shows_the_complete_methods(tiny: Path, tmp_path: Path) -> None:
    file, log = tmp_path / "text.txt", tmp_path / "log"
    file.write_text(LONG["input"])
    given = ("--pe", "default", "--pe", "yarn:4", "--lengths", "64", "--protocol", "sliding", "--stride", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setenv("ROPEWAY_DATABASE_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
        arguments = ["perplexity", str(file), *given, "--model", str(tiny)]
        running = forked(reporting_at_once, arguments, log=log)
    try:
        wait_for(lambda: "tokens, default" in log.read_text() or running.poll() is not None, 120)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    finally:
        running.kill()
    shown = log.read_text()
    assert "partial: 1 of 2 units are finished; missing: yarn(factor=4) (1)" in shown
    assert "Perplexity of" in shown
    assert "1 of 2 units are finished: the same command takes them over" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["4096", "64,128,4096"])
def test_ctrl_c_in_one_document_under_one_method(
    tiny: Path, tmp_path: Path, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass per length: those that are finished are the result."""
    file, log = tmp_path / "text.txt", tmp_path / "log"
    file.write_text(TEXT)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ROPEWAY_DATABASE_URL", f"sqlite:///{tmp_path / 'jobs.db'}")
    monkeypatch.setenv("ROPEWAY_SCORE_CHUNK", "16")
    given = ("--pe", "dynamic:4", "--protocol", "curve", "--lengths", lengths)
    running = forked(reporting_at_once, ["perplexity", str(file), *given, "--model", str(tiny)], log=log)
    try:
        wait_for(lambda: re.search(r"[1-9]\d %: .* of", log.read_text()) or running.poll() is not None, 120)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    finally:
        running.kill()
    shown = log.read_text()
    assert "Traceback" not in shown
    if lengths == "4096":
        assert "cancelled: no unit is finished, so nothing is kept" in shown
    else:
        assert "cancelled; 2 of 3 units are finished: the same command takes them over" in shown
        assert "At the lengths that finished: Perplexity of" in shown
        assert re.search(r"\b64 +128\b", shown)


def test_ctrl_c_before_the_result_is_shown_names_the_way_to_it(
    server: str, client: Ropeway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ropeway, "result", Mock(side_effect=KeyboardInterrupt))
    file = tmp_path / "text.txt"
    file.write_text(TEXT[:2000])
    measured = ropeway("perplexity", str(file), "--lengths", "64", "--server", server)
    job = client.jobs(limit=1)[0]
    again = f"interrupted; the job is done: ropeway jobs results {job.id[:12]} --server {server} shows its result"
    for shown in (measured, ropeway("jobs", "follow", job.id, "--server", server)):
        assert (shown.exit_code, again in shown.stderr) == (130, True)
    with pytest.raises(typer.Exit), finding_again(job, None):
        raise KeyboardInterrupt


def interrupted_by_typer(arguments: list[str]) -> None:
    """`ropeway`, for a fork, with Ctrl-C as the command has ended."""
    usual = sys.exit

    def leave(code: int) -> None:
        signal.raise_signal(signal.SIGINT)
        usual(code)

    sys.exit = leave  # type: ignore[assignment]
    command(arguments)


def test_ctrl_c_behind_the_end_of_a_command_prints_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = forked(interrupted_by_typer, ["methods"], log=log)
    assert running.wait(60) == 130
    assert "yarn" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_without_a_terminal_there_is_a_line_now_and_then(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LINE_S", "MEASURED_S", "LONG_S"):
        monkeypatch.setattr(progress, name, 0.0)
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    protocol = ("--protocol", "sliding", "--stride", "32", "--lengths", "64", "--server", server)
    shown = ropeway("perplexity", str(file), *protocol)
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stderr.splitlines() if " %: " in line]
    assert len(lines) > 3
    assert all(" tokens, perplexity" in line or " tokens, default" in line for line in lines)
    assert sum("more tokens to read, about" in line for line in shown.stderr.splitlines()) == 1
    job = ropeway("long-perplexity", str(file), "--alpha", "0.1", "--beta", "-6", "--lengths", "64", "--server", server)
    assert job.exit_code == 0, job.output
    assert any(" %: " in line for line in job.stderr.splitlines())


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (9000, "2.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text
