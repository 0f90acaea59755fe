"""An evaluation is a folder and a line. A toy one reaches the API, the jobs, the sweep, the shell, the client, the
report."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.evaluation.catalogue import EVALUATIONS, IN_SWEEPS
from service.evaluation.request import EvaluationRequest
from service.evaluation.results import EvaluationResult
from tests.conftest import ROOT
from tests.forks.command import ropeway
from tests.forks.process import forked
from tests.service.conftest import TEXT
from tests.service.serving import serving_sources

TOY = Path(__file__).parent / "last_token"
LINE = """
    Evaluation(
        "last_token", "NLL of the last token by length.", "service.evaluation.last_token.pictures:pictures"
    ),
"""
LAST_LINE = '        "service.figures.evaluations.sweep:sweep_pictures",\n        in_sweeps=False,\n    ),\n'
BODY = {"input": TEXT, "methods": ["default", "yarn:4"], "lengths": [64, 128]}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_every_line_names_what_exists(name: str) -> None:
    evaluation = EVALUATIONS[name]
    assert issubclass(evaluation.request, EvaluationRequest)
    assert issubclass(evaluation.result, EvaluationResult)
    assert callable(evaluation.plan)
    assert callable(evaluation.pictures)
    for kind in (evaluation.request, evaluation.result):
        assert kind.model_fields["evaluation"].default == name
    assert evaluation.request.model_validate(evaluation.request.example()).methods


def test_the_table_loads_no_evaluation() -> None:
    code = "import service.evaluation.catalogue, sys; print([m for m in sys.modules if m.startswith('service.')])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout == "['service.evaluation', 'service.evaluation.catalogue']\n"


def test_no_other_file_lists_evaluations() -> None:
    """Two names of evaluations as strings in one file are a list beside the catalogue. Clients have typed methods."""
    names = set(EVALUATIONS) - {"perplexity", "probe"}
    allowed = {"catalogue.py", "asynchronous.py", "synchronous.py"}
    for path in (ROOT / "service").rglob("*.py"):
        found = {name for name in names if f'"{name}"' in path.read_text(encoding="utf-8")}
        assert len(found) < 2 or path.name in allowed or path.parent.parent.name == "evaluation", (path, found)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The service with one more folder and one more line; every other file is a link to the real one."""
    root = tmp_path_factory.mktemp("tree")
    service, real = root / "service", ROOT / "service"
    (service / "evaluation").mkdir(parents=True)
    for path in (*real.iterdir(), *(real / "evaluation").iterdir()):
        if path.name not in ("evaluation", "catalogue.py", "__pycache__"):
            (service / path.relative_to(real)).symlink_to(path)
    shutil.copytree(TOY, service / "evaluation" / "last_token")
    catalogue = (real / "evaluation" / "catalogue.py").read_text(encoding="utf-8")
    assert catalogue.count(LAST_LINE) == 1
    (service / "evaluation" / "catalogue.py").write_text(catalogue.replace(LAST_LINE, LAST_LINE + LINE))
    return root


@pytest.fixture(scope="module")
def server(tree: Path, checkpoints: Path) -> Iterator[str]:
    with serving_sources(tree, checkpoints / "tiny") as url:
        yield url


def run(tree: Path, log: Path, *arguments: str) -> str:
    """The output of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        ended = forked(ropeway, str(tree), *arguments, log=log, folder=tree).wait(180)
    assert ended == 0, log.read_text()
    return log.read_text()


def test_the_api_has_its_routes_and_pictures(server: str) -> None:
    answer = httpx.post(f"{server}/last_token", json=BODY, timeout=180)
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert [method["label"] for method in result["methods"]] == ["default", "yarn(factor=4)"]
    assert httpx.get(f"{server}{result['links']['png']}", timeout=180).content.startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(httpx.get(f"{server}{result['links']['csv']}", timeout=180).text)))
    assert [float(row["nll"]) for row in rows] == [x for m in result["methods"] for x in m["nll"].values()]
    document = httpx.get(f"{server}/openapi.json", timeout=180).json()
    assert document["paths"]["/last_token"]["post"]["summary"] == "NLL of the last token by length"
    assert "last_token" in json.dumps(document["paths"]["/jobs"]["post"])
    refused = httpx.post(f"{server}/last_token", json={"lengths": [0]}, timeout=180)
    assert refused.json()["error"]["param"] == "lengths.0"


def test_a_sweep_compares_it(server: str) -> None:
    body = {**BODY, "evaluations": [{"evaluation": "last_token", "input": BODY["input"]}], "target": {"length": 128}}
    del body["input"]
    answer = httpx.post(f"{server}/sweep", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    assert answer.json()["methods"][0]["judgements"][0]["measure"] == "last perplexity"
    assert answer.json()["answer"]["best"]


def test_the_shell_runs_it_as_a_job_and_saves_its_report(tree: Path, server: str, tmp_path: Path) -> None:
    shown = " ".join(run(tree, tmp_path / "help", "--help").split())
    assert "last-token NLL of the last token by length." in shown
    text, report, plot = (tmp_path / name for name in ("text.txt", "report.html", "plot.html"))
    text.write_text(TEXT)
    outputs = ("--report", str(report), "--plot", str(plot))
    arguments = (str(text), "--pe", "default", "--pe", "yarn:4", "--lengths", "64,128", *outputs, "--server", server)
    shown = run(tree, tmp_path / "run", "last-token", *arguments)
    assert "Last perplexity of tiny by context length" in shown
    assert "yarn(factor=4)" in shown
    page = report.read_text(encoding="utf-8")
    assert "is best: last perplexity" in page
    assert "NLL of the last token" in page
    assert "NLL of the last token" in plot.read_text(encoding="utf-8")


def test_the_client_reads_its_result(tree: Path, server: str) -> None:
    code = f"""
import sys
from service.client import Ropeway
client = Ropeway({server!r})
answered = client.evaluate("last_token", input="a few words " * 50, lengths=[64])
job = client.submit("last_token", input="a few words " * 50, lengths=[64])
*units, ended = client.follow(job.id)
result = client.result(job.id)
print(type(answered).__name__, result.numbers() == answered.numbers(), ended.state, "torch" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "LastTokenResult True done False\n", done.stderr


def test_the_toy_is_in_no_catalogue_of_ours() -> None:
    assert "last_token" not in EVALUATIONS
    assert IN_SWEEPS[0].name == "perplexity", "the default of a sweep"
