"""The shell: perplexity against fake answers, listings, and commands that start a server themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from service.cli import server
from service.cli.evaluations import own_fields, separated
from service.cli.shared.options import lengths
from service.evaluation.documents import language_reference
from service.evaluation.perplexity.results import PerplexityResult
from tests.conftest import ROOT
from tests.service.cli.answers import Answer, events
from tests.service.cli.shell import ropeway
from tests.service.results import result_of

TRAINED_LENGTH = 64

JOB = {
    "id": "0123456789abcdef",
    "evaluation": "perplexity",
    "model": None,
    "state": "queued",
    "created_at": "2026-01-02T03:04:05Z",
    "units_total": 2,
    "tokens_total": 1024,
    "request": {},
}


class TestPerplexity:
    RESULT = result_of({"default": [6.5, 90.0], "yarn(factor=4)": [6.7, 7.0]}, [256, 512], documents=["a.txt"])

    @pytest.fixture
    def requests(self, fake: Callable[[Answer], list[httpx.Request]]) -> list[httpx.Request]:
        """Those that submit a job; the job has ended at its first event."""
        sent: list[httpx.Request] = []

        def answer(request: httpx.Request) -> httpx.Response:
            if request.method == "POST":
                sent.append(request)
                return httpx.Response(202, json=JOB)
            if request.url.path.endswith("/events"):
                return events(("job", JOB | {"state": "done"}))
            return httpx.Response(200, json=self.RESULT.model_dump(mode="json"))

        fake(answer)
        return sent

    def test_sends_the_request_and_prints_the_table(self, requests: list[httpx.Request], tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        file.write_text("some text ü", encoding="utf-8")
        arguments = ["--method", "default", "--method", "yarn:4", "--lengths", "256:512:256", "--bos", "never"]
        result = ropeway("perplexity", str(file), *arguments, "--server", "host:1")
        assert result.exit_code == 0, result.output
        for shown in ("a.txt", "default", "yarn(factor=4)", "90.00", "7.000"):
            assert shown in result.stdout
        assert json.loads(requests[0].content) == {
            "input": "some text ü",
            "names": ["a.txt"],
            "methods": [{"method": "default"}, {"method": "yarn", "factor": 4}],
            "lengths": {"start": 256, "stop": 512, "step": 256},
            "bos": "never",
            "evaluation": "perplexity",
        }

    def test_without_a_file_the_server_chooses_the_document(self, requests: list[httpx.Request]) -> None:
        assert ropeway("perplexity", "--server", "host:1").exit_code == 0
        assert json.loads(requests[0].content) == {"evaluation": "perplexity"}

    def test_knows_built_in_documents_and_stdin(self, requests: list[httpx.Request]) -> None:
        assert ropeway("perplexity", "python-reference", "--server", "host:1").exit_code == 0
        assert ropeway("perplexity", "-", "--server", "host:1", stdin="piped").exit_code == 0
        assert [json.loads(request.content)["input"] for request in requests] == ["python-reference", "piped"]

    def test_json_and_csv_are_whole_on_stdout(self, requests: list[httpx.Request]) -> None:
        result = ropeway("perplexity", "--json", "--server", "host:1")
        assert PerplexityResult.model_validate_json(result.stdout) == self.RESULT
        lines = ropeway("perplexity", "--csv", "--server", "host:1").stdout.splitlines()
        assert [line.split(",")[2] for line in lines] == ["length", "256", "512", "256", "512"]

    def test_saves_every_plot(self, requests: list[httpx.Request], tmp_path: Path) -> None:
        png, html = tmp_path / "curve.PNG", tmp_path / "curve.html"
        result = ropeway("perplexity", "--plot", str(png), "--plot", str(html), "--server", "host:1")
        assert result.exit_code == 0, result.output
        assert png.read_bytes().startswith(b"\x89PNG")
        assert "plotly.js" in html.read_text(encoding="utf-8")


def test_lengths_are_a_list_or_a_range() -> None:
    assert lengths(None) is None
    assert lengths("256") == [256]
    assert lengths("256, 512") == [256, 512]
    assert lengths("256:4096:128") == {"start": 256, "stop": 4096, "step": 128}


class TestListings:
    def test_methods_lists_all(self) -> None:
        from patches import METHODS

        printed = ropeway("methods").stdout.split()
        assert set(METHODS) <= set(printed)

    def test_a_method_is_shown_with_every_parameter(self) -> None:
        from patches import METHODS

        for name, method in METHODS.items():
            printed = ropeway("methods", name).stdout
            assert all(field[:12] in printed for field in method.model_fields if field != "method")
            words = " ".join(printed.split())
            paper = method.paper.split(",")[0]
            for told in (paper, method.formula, method.use, method.avoid, method.reach, method.evidence):
                assert told in words, (name, told)

    def test_as_json(self) -> None:
        (yarn,) = [info for info in json.loads(ropeway("methods", "--json").stdout) if info["method"] == "yarn"]
        assert json.loads(ropeway("methods", "yarn", "--json").stdout) == yarn

    @pytest.mark.parametrize(
        "commands", [["--help", "serve --help", "perplexity --help"], ["methods", "methods yarn", "sweep --fields"]]
    )
    def test_help_and_listings_load_no_heavy_library(self, commands: list[str]) -> None:
        each = "for command in sys.argv[1:]: app(command.split(), standalone_mode=False)"
        code = f"import sys\nfrom service.cli import app\n{each}\nprint(*sys.modules)"
        command = [sys.executable, "-c", code, *commands]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        loaded = set(printed.splitlines()[-1].split())
        assert "typer" in loaded
        heavy = {"torch", "transformers", "matplotlib", "plotly", "sqlalchemy", "fastapi", "httpx", "pyarrow"}
        assert heavy & loaded == set()
        if "--help" in commands:
            assert {"pydantic_settings", "structlog", "numpy", "service.client"} & loaded == set()


@pytest.fixture
def served(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of commands that start a server themselves."""
    for name, value in {"MODEL": str(tiny), "DEVICE": "cpu", "CACHE_TOKENS": "8192"}.items():
        monkeypatch.setenv(f"ROPEWAY_{name}", value)
    return tiny


@pytest.mark.slow
class TestInProcess:
    def test_generate_streams_what_json_reports(self, served: Path) -> None:
        arguments = ("generate", "The import statement", "--pe", "yarn:4", "-n", "12")
        answer = json.loads(ropeway(*arguments, "--json").stdout)
        assert answer["results"][0]["usage"]["completion_tokens"] == 12
        streamed = ropeway(*arguments)
        assert streamed.exit_code == 0, streamed.output
        assert streamed.stdout == answer["results"][0]["text"] + "\n"
        assert answer["results"][0]["pe"]["frequency_hash"] in streamed.stderr

    def test_generate_asks_for_what_the_server_knows(self, served: Path) -> None:
        result = ropeway("generate", "a", "-n", "4", "--min-tokens", "5", "--ignore-eos")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "error: min_tokens: " in result.stderr
        assert ropeway("generate", "a", "--choice", "rope", "--choice", "knot").stdout.strip() in ("rope", "knot")
        answer = json.loads(ropeway("generate", "a", "-n", "9", "--ignore-eos", "--json").stdout)
        assert answer["results"][0]["finish_reason"] == "length"

    def test_perplexity_of_a_file(self, served: Path, tmp_path: Path) -> None:
        file = tmp_path / "text.txt"
        file.write_text(language_reference()[:2000], encoding="utf-8")
        arguments = ("--method", "default", "--method", "dynamic", "--lengths", "64,128", "--json")
        result = PerplexityResult.model_validate_json(ropeway("perplexity", str(file), *arguments).stdout)
        assert [document.name for document in result.documents] == ["text.txt"]
        assert [method.label for method in result.methods] == ["default", "dynamic"]
        assert result.methods[0].lengths[0].perplexity == pytest.approx(result.methods[1].lengths[0].perplexity)

    def test_models(self, served: Path) -> None:
        assert [info["id"] for info in json.loads(ropeway("models", "--json").stdout)] == [served.name]
        assert str(TRAINED_LENGTH) in ropeway("models").stdout

    def test_the_servers_refusal_reaches_the_user(self, served: Path) -> None:
        result = ropeway("generate", "a", "--max-new-tokens", "9000")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "error: max_new_tokens: may be at most 4096" in result.stderr

    def test_a_command_says_once_what_it_loads(self, served: Path) -> None:
        lines = ropeway("models").stderr.splitlines()
        assert lines == [f"loading {served}"]

    def test_ctrl_c_while_a_model_loads_is_said(self, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server, "local_server", Mock(side_effect=KeyboardInterrupt))
        result = ropeway("models")
        assert (result.exit_code, result.stdout) == (130, "")
        assert result.stderr.splitlines() == [f"loading {served}", f"loading {served} was interrupted"]


class TestRepeatedOptions:
    """The parser would drop all but the last."""

    @pytest.mark.parametrize(
        ("command", "option", "value"),
        [
            ("generate Once --server host:1", "--model", "demo"),
            ("generate Once --server host:1", "--seed", "1"),
            ("perplexity --server host:1", "--lengths", "64"),
            ("perplexity --server host:1", "--protocol", "curve"),
            ("recommend --server host:1", "--windows", "4"),
            ("models", "--server", "host:1"),
        ],
    )
    def test_one_value_is_taken_once(self, command: str, option: str, value: str) -> None:
        result = ropeway(*command.split(), option, value, option, value)
        assert result.exit_code == 2
        assert f"{option}: is given more than once" in " ".join(result.stderr.split())

    def test_of_a_group_too(self) -> None:
        result = ropeway("jobs", "list", "--limit", "2", "--limit", "3")
        assert result.exit_code == 2

    def test_lists_go_on(self) -> None:
        fields = own_fields("passkey")
        assert separated(["--depths", "0.1", "--depths=[0.5,1]"], fields) == ([], {"depths": [0.1, 0.5, 1]})
