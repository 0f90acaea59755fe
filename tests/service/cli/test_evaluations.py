"""The shell's evaluations against the live server: fields, tables, reports, documents, and mistakes."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from service.cli.evaluations import own_fields, separated, value_of
from service.evaluation.catalogue import EVALUATIONS
from tests.service.cli.answers import Answer
from tests.service.cli.conftest import DOCUMENT
from tests.service.cli.shell import ropeway, succeeded
from tests.service.conftest import tiny_tokenizer


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
    search = "".join(succeeded("search", "--help").replace("│", "").split())
    assert "[default:(themethodsthatbeginthesearch)]" in search
    assert "--policy" not in search, "its result is no policy"


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
    assert "--to transformers or vllm" in " ".join(succeeded("recommend", "--fields").split())
    shown = " ".join(succeeded("long-perplexity", "--fields").split())
    assert "--reuse / --no-reuse --reuse A job reuses" in shown
    assert "boolean" not in shown
    assert shown == " ".join(succeeded("long_perplexity", "--fields").split()), "the name in the API is one here too"
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
    for options, message in (((), "long_perplexity writes no prompts"), (("--json",), "--include-text needs a report")):
        refused = ropeway(*common, "--include-text", *options)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_pictures_as_vectors_and_another_than_the_first(server: str, text: str, tmp_path: Path) -> None:
    common = ["perplexity", text, "--pe", "default", "--lengths", "64,128", "--server", server]
    files = {end: tmp_path / f"plot{end}" for end in (".svg", ".pdf", ".png", ".html")}
    plots = [part for file in files.values() for part in ("--plot", str(file))]
    succeeded(*common, *plots, "--picture", "nll-by-position")
    for end, start in ((".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", b"\x89PNG"), (".html", b"<!doctype html>")):
        assert files[end].read_bytes().startswith(start)
    assert b"NLL by position" in files[".svg"].read_bytes()
    assert b"NLL by position" in files[".html"].read_bytes()
    refused = ropeway(*common, *plots[:2], "--picture", "nll", "--report", str(tmp_path / "page.html"))
    assert refused.exit_code == 1
    assert "no picture 'nll': the result has perplexity, nll-by-position" in refused.stderr
    assert (tmp_path / "page.html").exists(), "the rest is saved before"


def test_json_with_the_prompts(server: str) -> None:
    common = ["passkey", "--lengths", "300", "--depths", "0.5", "--digits", "3", "--server", server]
    refused = ropeway(*common, "--include-text")
    assert (refused.exit_code, "add --report or --json" in refused.stderr) == (2, True)
    told = json.loads(succeeded(*common, "--include-text", "--json"))
    (cell,) = told["methods"][0]["cells"]
    assert all(output["expected"][0] in output["prompt"] for output in cell["outputs"])
    plain = succeeded(*common, "--json")
    assert '"prompt":' not in plain
    job_id = told["id"]
    whole = succeeded("jobs", "results", job_id, "--json", "--include-text", "--server", server)
    assert json.loads(whole)["methods"] == told["methods"]
    refused = ropeway("jobs", "results", job_id, "--include-text", "--server", server)
    assert (refused.exit_code, "--include-text needs --json" in refused.stderr) == (2, True)


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
        (["--plot", "x.jpeg"], "must end in .png, .svg, .pdf, .html"),
        (["--picture", "ruler"], "--picture needs --plot"),
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


def test_what_the_server_refuses_is_said(server: str) -> None:
    result = ropeway("passkey", "--depths", "2", "--server", server)
    assert result.exit_code == 1
    assert "depths.0" in result.output


def test_minutes_are_a_budget(server: str, text: str) -> None:
    """Too few are refused in minutes. The least of them suffice at about the same speed."""
    common = ["recommend", text, "--length", "128", "--windows", "16", "--pe", "yarn:2", "--server", server]
    refused = ropeway(*common, "--minutes", "1e-9")
    assert refused.exit_code == 1
    found = re.search(r"--minutes: 1e-09 is too little for 2 candidates: it must be at least (\S+)", refused.stderr)
    assert found, refused.stderr
    result = json.loads(succeeded(*common, "--minutes", str(100 * float(found[1])), "--json"))
    assert result["windows"] == 16


def test_the_speed_is_that_of_an_encoding_with_the_length(
    fake: Callable[[Answer], list[httpx.Request]],
) -> None:
    """The own encoding of a model with a table ends before it."""

    def answer(request: httpx.Request) -> httpx.Response:
        (method,) = json.loads(request.content).get("methods", [None])
        error = {"message": "this model's table ends", "type": "invalid_request_error", "param": "methods.0"}
        if method == "none":
            error = {"message": "enough", "type": "invalid_request_error", "param": None}
        return httpx.Response(400, json={"error": error})

    requests = fake(answer)
    refused = ropeway("recommend", "--length", "128", "--minutes", "1", "--server", "http://test")
    assert "error: enough" in refused.stderr
    asked = [json.loads(request.content) for request in requests if request.url.path == "/recommend"]
    assert [body["methods"] for body in asked] == [["default"], ["none"]]


@pytest.mark.parametrize("name", ["perplexity", "sweep"])
def test_what_the_server_refuses_names_the_file(server: str, text: str, tmp_path: Path, name: str) -> None:
    short = tmp_path / "short.txt"
    short.write_text("ropes")
    for files in ([str(short)], [text, str(short)]):
        result = ropeway(name, *files, "--lengths", "64", "--server", server)
        assert result.exit_code == 1
        assert "short.txt: at most" in " ".join(result.stderr.split())
        assert "input" not in result.stderr


@pytest.mark.parametrize("item", ["--reuse=false", "--reuse=True", "--no-reuse=1"])
def test_a_switch_takes_no_value(item: str) -> None:
    """It was on, whatever stood behind the equals sign."""
    with pytest.raises(typer.BadParameter, match="it is --reuse or --no-reuse"):
        separated([item], own_fields("sweep"))
    assert separated(["--no-reuse"], own_fields("sweep")) == ([], {"reuse": False})
    assert separated(["--to", "vllm"], own_fields("recommend")) == ([], {"target": "vllm"})
