"""The shell: against fake answers for what is printed, against a real server for the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from service.cli import server
from service.cli.shared import client
from service.cli.shared.options import lengths
from service.client import Ropeway
from service.evaluation.documents import BUILT_IN, language_reference
from service.evaluation.perplexity.results import PerplexityResult
from tests.conftest import ROOT
from tests.service.cli.shell import ropeway
from tests.service.results import result_of

TRAINED_LENGTH = 64
ALMOST = next(iter(BUILT_IN))[:-1]
"""A built-in document's name without its last letter."""
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[httpx.Request]]:
    """Lets --server answer with what a function makes of the request; returns the list of requests."""

    def install(answer: Answer) -> list[httpx.Request]:
        requests: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            return answer(request)

        def client_of(url: str, *, trust_env: bool = False) -> Ropeway:
            return Ropeway(url, transport=httpx.MockTransport(handle))

        monkeypatch.setattr(client, "client_of", client_of)
        return requests

    return install


def events(*items: tuple[str, Any]) -> httpx.Response:
    """A server-sent event stream; unnamed events have the name ''."""
    blocks = [
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
        for name, data in items
    ]
    return streamed("".join([": ping\n\n", *blocks, "data: [DONE]\n\n"]).encode())


def streamed(content: bytes) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream; charset=utf-8"}, content=content)


def end_of(index: int, method: str) -> tuple[str, dict[str, Any]]:
    pe = {
        "method": method,
        "factor": 4.0,
        "attention_factor": 1.139,
        "effective_rope_theta": 10000.0,
        "rotates_at": "cache_write",
        "frequency_hash": f"hash-of-{method}",
    }
    usage, timings = {"prompt_tokens": 3, "completion_tokens": 5}, {"queue_s": 0, "prefill_s": 0.1, "decode_s": 0.5}
    asked = {"index": index, "prompt_index": 0, "model": "tiny", "pe": pe, "auto": None}
    return "", {**asked, "finish_reason": "length", "logprobs": None, "usage": usage, "timings": timings}


def text(index: int, delta: str) -> tuple[str, dict[str, Any]]:
    return "", {"index": index, "text": delta, "token_ids": [1]}


class TestGenerate:
    def test_prints_the_text_alone_on_stdout(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        requests = fake(lambda _: events(text(0, "a\u2028b"), text(0, " [red]ü\x85"), end_of(0, "yarn")))
        flags = ("--pe", "yarn:4", "-n", "5", "--seed", "7", "--stop", "x")
        result = ropeway("generate", "Once", *flags, "--server", "host:1")
        assert (result.exit_code, result.stdout) == (0, "a\u2028b [red]ü\x85\n")
        facts = ("yarn on tiny", "cache write", "theta 10,000", "1.139", "hash-of-yarn", "3 + 5 tokens", "8 tokens/s")
        for fact in facts:
            assert fact in " ".join(result.stderr.split())
        assert str(requests[0].url) == "http://host:1/generate"
        assert json.loads(requests[0].content) == {
            "prompt": "Once",
            "pe": [{"method": "yarn", "factor": 4}],
            "max_new_tokens": 5,
            "seed": 7,
            "stop": ["x"],
            "stream": True,
        }

    def test_shows_several_encodings_side_by_side(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        fake(lambda _: events(text(1, "right\x1b[31m"), text(0, "left"), end_of(1, "yarn"), end_of(0, "default")))
        flags = ("--pe", "default", "--pe", '{"method": "yarn", "factor": 4}')
        result = ropeway("generate", "Once", *flags, "--server", "host:1")
        assert result.exit_code == 0
        (row,) = [line for line in result.stdout.splitlines() if "left" in line]
        assert row.index("left") < row.index("right")
        assert "\x1b" not in result.stdout
        assert "hash-of-default" in result.stdout
        assert '{"method": "yarn", "factor": 4}' in result.stdout

    def test_reads_the_prompt_from_stdin(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        requests = fake(lambda _: events(text(0, "."), end_of(0, "default")))
        assert ropeway("generate", "-", "--server", "host:1", stdin="two\nlines\n").exit_code == 0
        assert json.loads(requests[0].content)["prompt"] == "two\nlines"

    def test_json_is_the_servers_answer(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        end = end_of(0, "default")[1]
        answer = {"model": "tiny", "results": [{**end, "text": "ü", "token_ids": [1]}], "usage": end["usage"]}
        requests = fake(lambda _: httpx.Response(200, json=answer))
        result = ropeway("generate", "Once", "--json", "--model", "tiny", "--server", "host:1")
        assert json.loads(result.stdout) == answer
        assert json.loads(requests[0].content) == {"prompt": "Once", "model": "tiny"}

    def test_refuses_text_that_is_no_utf_8(self, tmp_path: Path) -> None:
        """As a byte of another encoding reaches a program: the shell's arguments have surrogates."""
        schema = tmp_path / "schema.json"
        schema.write_bytes(b'{"title": "caf\xe9"}')
        for arguments, told in {
            ("-",): "error: stdin: must be UTF-8 text, and byte 4 is not: convert it",
            ("Once", "--schema", str(schema)): f"error: {schema}: must be UTF-8 text, and byte 15 is not",
            ("caf\udce9",): "error: an argument must be UTF-8 text, and is not",
        }.items():
            result = ropeway("generate", *arguments, "--server", "127.0.0.1:9", stdin=b"caf\xe9")
            assert result.exit_code == 1
            assert told in result.stderr


REFUSAL = {
    "error": {"message": "must be at least 1", "type": "invalid_request_error", "param": "pe.factor", "code": "x"}
}
IN_STREAM = f"data: {json.dumps(REFUSAL)}\n\n".encode()


class TestFailures:
    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (httpx.Response(400, json=REFUSAL), "error: pe.factor: must be at least 1"),
            (httpx.Response(502, text="<html>bad gateway"), "answered 502 Bad Gateway"),
        ],
        ids=["refused", "a proxy's page"],
    )
    def test_of_an_evaluation_is_one_line_and_exit_code_1(
        self, fake: Callable[[Answer], list[httpx.Request]], answer: httpx.Response, message: str
    ) -> None:
        fake(lambda _: httpx.Response(answer.status_code, headers=answer.headers, content=answer.content))
        result = ropeway("perplexity", "--server", "host:1")
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr
        assert "Traceback" not in result.output

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (httpx.Response(400, json=REFUSAL), "error: pe.factor: must be at least 1"),
            (streamed(IN_STREAM), "error: pe.factor: must be at least 1"),
            (streamed(b'data: {"index": 0, "text": "a", "token_ids": [1]}\n\n'), "error: the server ended the answer"),
            (httpx.Response(502, text="<html>bad gateway"), "answered 502 Bad Gateway"),
            (httpx.Response(404, json={"detail": "Not Found"}), "answered 404 Not Found"),
        ],
        ids=["refused", "refused in the stream", "cut off", "a proxy's page", "another server"],
    )
    def test_is_one_line_and_exit_code_1(
        self, fake: Callable[[Answer], list[httpx.Request]], answer: httpx.Response, message: str
    ) -> None:
        fake(lambda _: httpx.Response(answer.status_code, headers=answer.headers, content=answer.content))
        result = ropeway("generate", "Once", "--server", "host:1")
        assert result.exit_code == 1
        assert message in result.stderr
        assert "Traceback" not in result.output

    def test_nothing_listens(self) -> None:
        result = ropeway("generate", "Once", "--server", "127.0.0.1:9")
        assert result.exit_code == 1
        assert "error: no answer from http://127.0.0.1:9" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("generate", "a", "--pe", "yrn:4"), "unknown method 'yrn'"),
            (("generate", "a", "--pe", "yarn:0.5"), "factor: must be at least 1, not 0.5"),
            (("generate", "a", "--pe", "yarn:4,beta=1"), "beta: unknown field: did you mean beta_slow"),
            (("generate", "a", "--pe", "{"), "not valid JSON"),
            (("generate", "a", "--pe", "auto:factor=4"), "auto takes no parameters: it chooses by the reserved length"),
            (("export", "auto:4", "--to", "vllm"), "auto takes no parameters: it chooses by the reserved length"),
            (("generate", "a", "--pe", '{"method": "auto", "x": 1}'), "x: unknown field: auto takes ranges or nothing"),
            (("generate",), "Missing argument"),
            (("perplexity", "--lengths", "1:2"), "neither a list like"),
            (("perplexity", "--plot", "curve.svg"), "must end in .png or .html"),
            (("perplexity", "--plot", "/no/such/folder/curve.png"), "there is no folder"),
            (("perplexity", "--json", "--csv"), "exclude each other"),
            (("perplexity", "--protocol", "square"), "protocol: must be"),
            (("generate", "a", "--temperature", "-1"), "Input should be greater than or equal to 0"),
            (("serve", "--port", "70000"), "Input should be less than or equal to 65535"),
            (("generate", "a", "--stop", ""), "stop"),
            (("generate", "a", "--regex", "a", "--choice", "b"), "structured_outputs: needs exactly one of json"),
            (("generate", "a", "--schema", "pyproject.toml"), "structured_outputs.json: is no JSON"),
            (("perplexity", "--stride", "8"), "stride has no meaning for protocol curve"),
            (("perplexity", "--lengths", "1"), "lengths.0: must be at least 2, not 1"),
            (("export", "yrn", "--to", "vllm"), "Invalid value for ENCODING: yrn: unknown method 'yrn'"),
            (("methods", "--json", "--markdown"), "--json and --markdown exclude each other"),
            (("methods", "yarn", "--markdown"), "--markdown and --docs have every method: leave out the name"),
            (("methods", "yarn", "--docs", "docs"), "--markdown and --docs have every method"),
            (("serve", "--set", "max_queue"), "is not NAME=VALUE"),
            (("serve", "--set", "prot=1"), "Invalid value for --set: ROPEWAY_PROT: no setting; is it ROPEWAY_PORT?"),
            (("serve", "--set", "colour=1"), "is not NAME=VALUE with one of: model, revision"),
        ],
    )
    def test_usage_is_refused_before_any_work(
        self, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROPEWAY_MODEL", "/no/such/model")
        result = ropeway(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())

    def test_a_mistake_is_found_without_the_libraries_of_a_server(self) -> None:
        code = "import sys; sys.modules['torch'] = sys.modules['fastapi'] = None; from service.cli import app; app()"
        command = [sys.executable, "-c", code, "perplexity", "--protocol", "square"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 2, run.stderr
        assert "protocol: must be 'curve'" in run.stderr
        assert "Traceback" not in run.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("perplexity", "/no/such/file"), "/no/such/file: No such file"),
            (("perplexity", ALMOST), f"{ALMOST}: No such file or directory; did you mean the built-in document"),
            (("methods", "yrn"), "unknown method 'yrn'"),
            (("serve", "--set", "port=70000"), "ROPEWAY_PORT: Input should be less than or equal to 65535"),
            (("serve", "--set", "page_size=x"), "ROPEWAY_PAGE_SIZE: Input should be a valid integer"),
            (("serve", "--model", "/no/such/model"), "ROPEWAY_MODEL: model '/no/such/model' cannot be loaded"),
            (("models", "--model", "/no/such/model"), "ROPEWAY_MODEL: model '/no/such/model' cannot be loaded"),
        ],
    )
    def test_what_is_missing_or_out_of_range_is_named(self, arguments: tuple[str, ...], message: str) -> None:
        result = ropeway(*arguments)
        assert result.exit_code == 1
        assert f"error: {message}" in result.stderr
        assert "Traceback" not in result.output


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
        "arguments",
        ["--help", "serve --help", "perplexity --help", "methods", "methods yarn", "sweep --fields"],
    )
    def test_help_and_listings_load_no_heavy_library(self, arguments: str) -> None:
        code = "import sys; from service.cli import app; app(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
        command = [sys.executable, "-c", code, *arguments.split()]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        loaded = set(printed.splitlines()[-1].split())
        assert "typer" in loaded
        heavy = {"torch", "transformers", "matplotlib", "plotly", "sqlalchemy", "fastapi", "httpx", "pyarrow"}
        assert heavy & loaded == set()
        if "--help" in arguments:
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
