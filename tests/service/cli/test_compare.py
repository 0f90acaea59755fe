"""``ropeway compare``: files and jobs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from service.cli.shared import terminal
from tests.service.cli.shell import ropeway, succeeded
from tests.service.figures.measured import passkey, perplexity


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two results as `--json` prints them, in the working directory."""
    for name, result in (("before", perplexity()), ("after", perplexity(("default", "yarn(factor=8)")))):
        (tmp_path / f"{name}.json").write_text(result.model_dump_json(indent=2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_compared_and_drawn(files: Path) -> None:
    output = succeeded("compare", "before.json", "tuned=after.json", "--plot", "a.png", "--report", "a.html")
    words = " ".join(output.split())
    assert "default (before)" in words
    assert "yarn(factor=8) (tuned) has 1.000" in words
    assert (files / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "yarn(factor=8) (tuned)" in (files / "a.html").read_text()
    assert "Perplexity against before" in succeeded_plot(files, "change")


@pytest.mark.parametrize(("columns", "below"), [("120", True), ("70", False)])
def test_ratios_are_printed_by_length(files: Path, monkeypatch: pytest.MonkeyPatch, columns: str, below: bool) -> None:
    monkeypatch.setattr(terminal.stdout, "_width", int(columns))
    output = succeeded("compare", "before.json", "tuned=after.json", "--baseline", "default", "--report", "a.html")
    heading = "Perplexity against default (before) by context length: ratio"
    table = output.partition(heading)[2].partition("the 95 % interval excludes 1")[0]
    result = json.loads(succeeded("compare", "before.json", "tuned=after.json", "--baseline", "default", "--json"))
    for method in result["methods"]:
        assert (method["name"] in table) == (method["partner"] is not None)
        for at in method["lengths"]:
            if change := at["change"]:
                mark = "*" if change["verdict"] in ("better", "worse") else ""
                assert f" {change['value']:.3f}{mark} " in table
    assert "*" in table
    assert ("[" in table) == below
    assert ("95 % interval: in --csv" in output) != below
    page = (files / "a.html").read_text()
    assert heading in page
    assert '*<span class="interval">' in page


def test_methods_of_one_file_are_compared(files: Path) -> None:
    output = succeeded("compare", "before.json", "--baseline", "alibi")
    assert "Perplexity against alibi by context length: ratio" in output
    assert "yarn(factor=8) has" in " ".join(output.split())


def test_cautions_are_printed_once(files: Path) -> None:
    words = " ".join(succeeded("compare", "after.json", "before.json").split())
    assert words.count("The first result has no partner of alibi (before)") == 1


def succeeded_plot(files: Path, picture: str) -> str:
    succeeded("compare", "before.json", "after.json", "--plot", "b.svg", "--picture", picture)
    return (files / "b.svg").read_text()


def test_the_result_is_printed_as_json_and_csv(files: Path) -> None:
    result = json.loads(succeeded("compare", "before.json", "after.json", "--json", "--baseline", "alibi"))
    assert {method["partner"] for method in result["methods"]} == {None, "alibi (before)"}
    assert succeeded("compare", "before.json", "after.json", "--csv").startswith("method,model,length,source,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one.json"], "a comparison needs two results at least, or one of several methods"),
        (
            ["before.json", "before.json"],
            "two results have the name 'before.json': give each its own, as in NAME=RESULT",
        ),
        (["before.json", "none.json"], "none.json: No such file or directory"),
        (["before.json", "text.txt"], "text.txt: is no result of an evaluation"),
        (["before.json", "passkey.json"], "before is of perplexity, and passkey of passkey"),
        (["before.json", "after.json", "--baseline", "nope"], "--baseline: 'nope' is none of"),
        (["before.json", "after.json", "--picture", "change"], "--picture needs --plot"),
    ],
)
def test_wrong_results_are_refused_by_name(files: Path, arguments: list[str], message: str) -> None:
    (files / "text.txt").write_text("a text")
    (files / "one.json").write_text(perplexity(["default"]).model_dump_json())
    (files / "passkey.json").write_text(passkey().model_dump_json())
    result = ropeway("compare", *arguments)
    assert result.exit_code == (2 if "--picture" in arguments else 1)
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_jobs_of_a_server_are_compared(fake, files: Path) -> None:  # type: ignore[no-untyped-def]
    jobs = {"a" * 32: perplexity(), "b" * 32: perplexity()}
    asked = fake(lambda request: httpx.Response(200, text=jobs[request.url.path.split("/")[2]].model_dump_json()))
    words = " ".join(succeeded("compare", "a" * 32, f"tuned={'b' * 32}", "--server", "http://x").split())
    assert "default (tuned) has 1.000" in words
    assert [request.url.path for request in asked] == [f"/jobs/{job}/results.json" for job in jobs]


def test_names_and_places_may_have_the_sign_of_equality(files: Path) -> None:
    for folder in ("a=1", "b=2"):
        (files / folder).mkdir()
        (files / folder / "result.json").write_text(perplexity().model_dump_json())
    words = " ".join(succeeded("compare", "a=1/result.json", "lr=2=b=2/result.json").split())
    assert "default (lr=2) has 1.000" in words or "default (lr) has 1.000" in words
    assert "default (a=1/result.json)" in words
