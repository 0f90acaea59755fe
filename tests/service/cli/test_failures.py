"""Failures of commands: one line on stderr, an exit code, and mistakes that are found before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

from service.api.http.access import unauthorized
from service.errors import body_of
from service.evaluation.documents import BUILT_IN
from tests.conftest import ROOT
from tests.service.cli.answers import Answer, streamed
from tests.service.cli.shell import ropeway

ALMOST = next(iter(BUILT_IN))[:-1]
"""A built-in document's name without its last letter."""

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

    @pytest.mark.parametrize("command", [["generate", "Once"], ["jobs", "list"], ["perplexity"]], ids="-".join)
    def test_a_refused_key_names_the_variable_that_has_it(
        self, fake: Callable[[Answer], list[httpx.Request]], command: list[str]
    ) -> None:
        refusal = body_of(unauthorized())
        fake(lambda _: httpx.Response(401, json=refusal))
        result = ropeway(*command, "--server", "host:1")
        assert result.exit_code == 1
        assert f"{refusal['error']['message']}. Commands take the key from ROPEWAY_API_KEY," in result.stderr

    def test_a_key_that_no_header_can_have_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROPEWAY_API_KEY", "“tulip”")
        result = ropeway("generate", "Once", "--server", "127.0.0.1:9")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: api_key, by default ROPEWAY_API_KEY: an API key must be")
        assert "tulip" not in result.stderr

    def test_nothing_listens(self) -> None:
        result = ropeway("generate", "Once", "--server", "127.0.0.1:9")
        assert result.exit_code == 1
        assert "error: no answer from http://127.0.0.1:9" in result.stderr

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("generate", "a", "--pe", "yrn:4"), "unknown method 'yrn'"),
            (
                ("generate", "a", "--pe", '{"method":"yarn","factor":4,"factor":8}'),
                "factor: is given twice in an object",
            ),
            (("generate", "a", "--pe", "yarn:0.5"), "factor: must be at least 1, not 0.5"),
            (("generate", "a", "--pe", "yarn:4,beta=1"), "beta: unknown field: did you mean beta_slow"),
            (("generate", "a", "--pe", "{"), "not valid JSON"),
            (("generate", "a", "--pe", "auto:factor=4"), "auto takes no parameters: it chooses by the reserved length"),
            (("export", "auto:4", "--to", "vllm"), "auto takes no parameters: it chooses by the reserved length"),
            (("generate", "a", "--pe", '{"method": "auto", "x": 1}'), "x: unknown field: auto takes ranges or nothing"),
            (("generate",), "Missing argument"),
            (("perplexity", "--lengths", "1:2"), "neither a list like"),
            (("perplexity", "--plot", "curve.gif"), "must end in .png, .svg, .pdf, .html"),
            (("perplexity", "--plot", "/no/such/folder/curve.png"), "there is no folder"),
            (("perplexity", "--json", "--csv"), "exclude each other"),
            (("perplexity", "--protocol", "square"), "protocol: must be"),
            (("generate", "a", "--temperature", "-1"), "Input should be greater than or equal to 0"),
            (("serve", "--port", "70000"), "Input should be less than or equal to 65535"),
            (("generate", "a", "--stop", ""), "stop"),
            (("generate", "a", "--regex", "a", "--choice", "b"), "structured_outputs: needs exactly one of json"),
            (("generate", "a", "--schema", "pyproject.toml"), "structured_outputs.json: not valid JSON"),
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
            (("serve", "--set", "revision=main"), "ROPEWAY_REVISION: only models of the hub have revisions"),
            (("serve", "--model", "/no/such/model"), "ROPEWAY_MODEL: model '/no/such/model' cannot be loaded"),
            (("models", "--model", "/no/such/model"), "ROPEWAY_MODEL: model '/no/such/model' cannot be loaded"),
        ],
    )
    def test_what_is_missing_or_out_of_range_is_named(self, arguments: tuple[str, ...], message: str) -> None:
        result = ropeway(*arguments)
        assert result.exit_code == 1
        assert f"error: {message}" in result.stderr
        assert "Traceback" not in result.output
