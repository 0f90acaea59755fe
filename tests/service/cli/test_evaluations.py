"""The shell's evaluations and jobs against the live server."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from pyarrow import parquet

from service.cli.evaluations import own_fields, separated, value_of
from service.cli.jobs import jobs
from service.client import Ropeway
from service.client.requests import DEFAULT_URL
from service.evaluation.catalogue import EVALUATIONS
from tests.service.cli.shell import ropeway
from tests.service.conftest import TEXT, tiny_tokenizer
from tests.service.unprivileged import unprivileged

DOCUMENT = TEXT[:9000]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "ropes.txt"
    path.write_text(DOCUMENT)
    return str(path)


def succeeded(*arguments: str) -> str:
    result = ropeway(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_evaluation_has_a_command_with_its_fields() -> None:
    shown = " ".join(succeeded("--help").split())
    assert all(f" {name.replace('_', '-')} " in shown for name in EVALUATIONS), shown
    for name, options in {
        "passkey": ["--depths", "--samples", "--digits"],
        "perplexity": ["--protocol", "--stride", "--tail", "--bos"],
        "sweep": ["--factors", "--target", "--evaluations"],
        "probe": ["--distances", "--segment"],
    }.items():
        assert all(
            option in succeeded(name, "--help")
            for option in ["--lengths", "--report", "--background", "--cancel", "--fields"]
        )
        shown = succeeded(name, "--fields")
        assert all(option in shown for option in options), shown


def test_help_says_which_encodings_are_measured_without_any() -> None:
    recommend, sweep = ("".join(succeeded(name, "--help").replace("│", "").split()) for name in ("recommend", "sweep"))
    assert "[default:(thecandidatesofallmethods)]" in recommend
    assert "[default:(default)]" not in recommend
    assert "[default:(default)]" in sweep


def test_fields_that_are_objects_are_explained() -> None:
    shown = " ".join(succeeded("sweep", "--fields").split())
    for told in (
        "--target object",
        "length integer from 2",
        "tolerance number from 0 up to 10 0.1",
        "within its trained length",
    ):
        assert told in shown, shown
    assert "--evaluations list of names or objects" in shown
    assert "One of: long_perplexity, needle, passkey, perplexity, ruler." in shown
    shown = " ".join(succeeded("long-perplexity", "--fields").split())
    assert "--evaluator object" in shown
    assert "model string A served model" in shown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("0,0.5,1", [0, 0.5, 1]),
        ("[1, 2]", [1, 2]),
        ('{"length": 512}', {"length": 512}),
        ("word", "word"),
        ("niah_single_1,vt", ["niah_single_1", "vt"]),
        ("true", True),
    ],
)
def test_values_of_options(text: str, value: Any) -> None:
    assert value_of(text) == value


def test_a_table_a_report_and_a_picture(server: str, text: str, tmp_path: Path) -> None:
    report, picture = tmp_path / "report.html", tmp_path / "plot.png"
    shown = succeeded(
        "long-perplexity",
        text,
        *("--pe", "default", "--pe", "yarn:4", "--lengths", "64,128", "--alpha", "0.1", "--beta", "-6"),
        *("--server", server, "--report", str(report), "--plot", str(picture)),
    )
    assert "yarn(factor=4)" in shown
    assert "128" in shown
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert "plotly.js v" in page
    assert Path(text).read_text()[:60] not in page
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_with_its_text(server: str, text: str, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    common = ["long-perplexity", text, "--lengths", "64", "--alpha", "0.1", "--beta", "-6", "--server", server]
    succeeded(*common, "--report", str(report), "--include-text")
    assert Path(text).read_text()[:60] in report.read_text()
    refused = ropeway(*common, "--include-text")
    assert refused.exit_code == 2
    assert "add --report" in refused.stderr


def test_json_and_csv_are_the_whole_result(server: str, text: str) -> None:
    common = ["sweep", text, "--pe", "yarn:2", "--factors", "2,4", "--lengths", "64,128", "--server", server]
    result = json.loads(succeeded(*common, "--json"))
    assert result["evaluations"][0]["documents"][0]["tokens"] > 1000
    assert [method["label"] for method in result["methods"]] == ["default", "yarn(factor=2)", "yarn(factor=4)"]
    rows = list(csv.DictReader(io.StringIO(succeeded(*common, "--csv"))))
    assert [(row["method"], row["length"]) for row in rows] == [
        (method["label"], length) for method in result["methods"] for length in ("64", "128")
    ]
    assert result["answer"]["words"].partition(";")[0] in " ".join(succeeded(*common).split())


def test_documents_are_named_after_their_files(server: str, text: str) -> None:
    result = json.loads(succeeded("long-perplexity", text, "--lengths", "64", "--server", server, "--json"))
    assert [document["name"] for document in result["documents"]] == ["ropes.txt"]


@pytest.mark.parametrize("name", ["perplexity", "long-perplexity", "needle", "sweep"])
def test_documents_are_cut(server: str, text: str, name: str) -> None:
    own = ("--depths", "0.5", "--samples", "1", "--lengths", "256") if name == "needle" else ("--lengths", "64")
    result = json.loads(succeeded(name, text, "--max-tokens", "200", *own, "--server", server, "--json"))
    (document,) = result["evaluations"][0]["documents"] if name == "sweep" else result["documents"]
    assert (document["tokens"], document["cut_from"]) == (200, len(tiny_tokenizer()(DOCUMENT)["input_ids"]) - 1)


def test_a_server_is_started_where_none_is_named(checkpoints: Path, text: str) -> None:
    shown = succeeded("sweep", text, "--model", str(checkpoints / "tiny"), "--pe", "yarn:2", "--lengths", "64,128")
    assert "yarn(factor=2)" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "--csv"], "exclude each other"),
        (["--background"], "--background needs --server"),
        (["--cancel"], "--cancel needs --server"),
        (["--plot", "x.jpeg"], "must end in .png or .html"),
        (["--nonsense", "1"], "no option --nonsense"),
        (["--sample", "1"], "did you mean --samples?"),
        (["--length", "512"], "no option --length: did you mean --lengths?"),
        (["--repot=a.html"], "no option --repot: did you mean --report?"),
        (["-o", "a.html"], "no option -o: --help and --fields list what there is"),
        (["-pe", "yarn:4"], "no option -pe: did you mean --pe?"),
        (["--samples"], "--samples needs a value"),
        (["--pe", "nonsense"], "unknown method"),
        (["--pe", "default", "--pe", "default"], "default is named twice: name each one once"),
        (["--pe", "yarn:4", "--pe", "yarn:factor=4"], "yarn:factor=4 is the same encoding as yarn:4"),
        (["--depths", "2"], "depths.0: must be at most 1, not 2"),
        (["--samples", "0"], "samples: must be at least 1, not 0"),
        (["--digits", "long"], "digits: must be a whole number, not 'long'"),
    ],
)
def test_mistakes_are_found_before_anything_is_done(arguments: list[str], message: str) -> None:
    result = ropeway("passkey", *arguments, *(() if "--plot" in arguments else ("--model", "/no/such/model")))
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("name", "option", "way"),
    [
        ("perplexity", ["--plot", "a.png"], "`ropeway report JOB`"),
        ("sweep", ["--report", "a.html"], "`ropeway report JOB`"),
        ("recommend", ["--json"], "`ropeway jobs results JOB`"),
        ("passkey", ["--csv"], "`ropeway jobs results JOB`"),
        ("sweep", ["--cancel"], "`ropeway jobs cancel JOB`"),
        ("recommend", ["--policy", "a.json"], "the same command without --background"),
    ],
)
def test_a_job_in_the_background_refuses_what_needs_its_end(name: str, option: list[str], way: str) -> None:
    result = ropeway(name, *option, "--background", "--server", "http://127.0.0.1:9")
    assert result.exit_code == 2
    told = " ".join(result.stderr.replace("│", "").split())
    assert f"--background and {option[0]} exclude each other: {way}" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recommend", "--report", "."], "--report: '.' is a folder, and the output is a file"),
        (["recommend", "--policy", "."], "--policy: '.' is a folder"),
        (["recommend", "--plot", "dir.png"], "--plot: 'dir.png' is a folder"),
        (["recommend", "--report", "no/a.html"], "--report: there is no folder 'no'"),
        (["recommend", "--report", "a" * 300], "a: File name too long"),
        (
            ["recommend", "--plot", "same.html", "--report", "./same.html"],
            "--report: 'same.html' is the file of --plot already",
        ),
        (
            ["recommend", "--plot", "same.png", "--plot", "link/same.png"],
            "'link/same.png' is the file of --plot already",
        ),
        (["report", "0123", "-o", "dir.png"], "--output: 'dir.png' is a folder"),
        (["report", "0123", "--output", "no/a.html"], "--output: there is no folder 'no'"),
        (["jobs", "results", "0123", "--parquet", "dir.png"], "--parquet: 'dir.png' is a folder"),
        (["jobs", "results", "0123", "--parquet", "no/a"], "--parquet: there is no folder 'no'"),
        (["methods", "--docs", "file/docs"], "file' is a file, and the output is a folder"),
        (["demo", "--output", "file"], "--output: 'file' is a file, and the output is a folder"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dir.png").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROPEWAY_MODEL", "/no/such/model")
    monkeypatch.setenv("ROPEWAY_URL", "http://127.0.0.1:9")
    result = ropeway(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize("name", ["file", "new", "dir/new"])
def test_outputs_without_the_right_to_them_are_refused_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unprivileged() as folder:
        monkeypatch.chdir(folder)
        (folder / "file").touch(0o400)
        (folder / "dir").mkdir(0o500)
        folder.chmod(0o500 if name == "new" else 0o700)
        results = [
            ropeway("report", "0123", "-o", name, "--server", "127.0.0.1:9"),
            ropeway("perplexity", "--report", name, "--model", "/no/such/model"),
            ropeway("demo", "--output", f"{name}/docs" if name == "new" else "dir/docs"),
        ]
        folder.chmod(0o700)
    for result in results:
        assert result.exit_code == 2
        assert "there is no right to write to" in " ".join(result.stderr.replace("│", "").split())


def test_what_the_server_refuses_is_said(server: str) -> None:
    result = ropeway("passkey", "--depths", "2", "--server", server)
    assert result.exit_code == 1
    assert "depths.0" in result.output


@pytest.mark.parametrize("name", ["perplexity", "sweep"])
def test_what_the_server_refuses_names_the_file(server: str, text: str, tmp_path: Path, name: str) -> None:
    short = tmp_path / "short.txt"
    short.write_text("ropes")
    for files in ([str(short)], [text, str(short)]):
        result = ropeway(name, *files, "--lengths", "64", "--server", server)
        assert result.exit_code == 1
        assert "short.txt: at most" in " ".join(result.stderr.split())
        assert "input" not in result.stderr


# Jobs


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
    assert f"{Path(text).name}, other.txt (" in page.read_text()
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
    assert httpx.get(f"{server}/jobs/{done}").status_code == 200


@pytest.mark.parametrize("item", ["--reuse=false", "--reuse=True", "--no-reuse=1"])
def test_a_switch_takes_no_value(item: str) -> None:
    """It was on, whatever stood behind the equals sign."""
    with pytest.raises(typer.BadParameter, match="it is --reuse or --no-reuse"):
        separated([item], own_fields("sweep"))
    assert separated(["--no-reuse"], own_fields("sweep")) == ([], {"reuse": False})
