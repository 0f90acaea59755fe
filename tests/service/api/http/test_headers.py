"""Headers, ids and logs: the parts of an answer beside its body, and the lines that a request leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest
import structlog
from fastapi import FastAPI
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from service import logs
from tests.service.api.conftest import ANN, GENERATE
from tests.service.serving import serving


@pytest.fixture
def client(guarded: tuple[str, FastAPI, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded[0], timeout=60) as client:
        yield client


@pytest.mark.parametrize("standalone", ["true", "false"])
def test_pages_carry_headers_that_fit_them(client: httpx.Client, standalone: str) -> None:
    result = client.post("/perplexity", json={"input": [5, 6, 7] * 8, "lengths": [8, 16]}, headers=ANN).json()
    page = client.get(result["links"]["html"], params={"standalone": standalone}, headers=ANN)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    allowed = policy.partition("script-src")[2].partition(";")[0].split()
    assert "'unsafe-inline'" not in allowed
    assert ("'self'" in allowed) == (standalone == "false"), "what is in the page needs nothing from outside"
    running = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in running}
    assert hashes == set(allowed) - {"'self'"}
    assert ("src=" in "".join(re.findall(r"<script[^>]*>", page.text))) == (standalone == "false")
    outside_scripts = re.sub(r"<script[^>]*>.*?</script>", "", page.text, flags=re.DOTALL)
    assert not re.search(r"<[^>]+\son\w+\s*=", outside_scripts), "the policy blocks event attributes"
    docs = client.get("/docs", headers=ANN)
    for answer in (page, docs):
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert client.get("/models", headers=ANN).headers["x-content-type-options"] == "nosniff"


def test_a_page_and_its_script_are_small_and_the_script_needs_no_key(client: httpx.Client) -> None:
    result = client.post("/perplexity", json={"input": [5, 6, 7] * 8, "lengths": [8, 16]}, headers=ANN).json()
    page = client.get(result["links"]["html"], headers=ANN)
    assert len(page.content) < 50_000
    (source,) = re.findall(r'<script src="([^"]+)">', page.text)
    address = page.url.join(source)
    script = httpx.get(address, headers={"Accept-Encoding": "gzip"})
    assert script.status_code == 200, "a page cannot send a key for its script"
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert script.headers["content-encoding"] == "gzip"
    assert int(script.headers["content-length"]) < 2_000_000
    assert script.headers["x-content-type-options"] == "nosniff"
    plain = httpx.get(address, headers={"Accept-Encoding": "identity"})
    assert plain.text == script.text == get_plotlyjs()
    assert get_plotlyjs_version() in address.path
    assert client.get("/static/plotly-0.0.0.min.js").status_code == 404
    whole = client.get(result["links"]["html"], params={"standalone": "true"}, headers=ANN).text
    assert get_plotlyjs() in whole


def test_other_origins_are_let_in_by_name_only(client: httpx.Client, server: str) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = client.options("/generate", headers={"Origin": "https://a.example", **asks})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    denied = client.options("/generate", headers={"Origin": "https://b.example", **asks})
    assert "access-control-allow-origin" not in denied.headers
    default = httpx.get(f"{server}/models", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in default.headers


def test_a_page_may_use_every_method_and_read_what_clients_retry_by(guarded: tuple[str, FastAPI, Path]) -> None:
    url = f"{guarded[0]}/generate"
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "PUT"}
    assert httpx.options(url, headers=asked).status_code == 200
    exposed = httpx.get(url, headers={"Origin": "https://a.example", **ANN}).headers["access-control-expose-headers"]
    assert {"retry-after", "x-request-id", "x-should-retry"} <= set(exposed.split(", "))


@pytest.mark.parametrize("given", ["abc-123", "a" * 128, "00-trace:span/1=@+"])
def test_a_request_id_comes_back(client: httpx.Client, given: str) -> None:
    for path, headers in (("/health", {}), ("/nowhere", ANN), ("/models", {}), ("/models", ANN)):
        assert client.get(path, headers={**headers, "X-Request-Id": given}).headers["x-request-id"] == given
    body = json.dumps(GENERATE | {"stream": True})
    with client.stream("POST", "/generate", content=body, headers={**ANN, "X-Request-Id": given}) as answer:
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "two words", 'quo"te', "new\tline"])
def test_a_request_id_that_could_spoil_a_log_is_replaced(client: httpx.Client, given: str) -> None:
    answer = client.get("/health", headers={"X-Request-Id": given})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


@contextmanager
def logging_as(form: Literal["console", "json"]) -> Iterator[None]:
    before = structlog.get_config()
    logs.configure("info", form)
    try:
        yield
    finally:
        structlog.configure(**before)


def test_every_log_line_has_the_id_and_none_a_prompt(
    client: httpx.Client,
    guarded: tuple[str, FastAPI, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "my secret prompt"
    headers = {**ANN, "X-Request-Id": "the-id"}

    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("broken")

    with logging_as("json"):
        for body in ({"prompt": secret, "max_new_tokens": 2}, {"prompt": secret, "max_new_tokens": 0}):
            client.post("/generate", json=body, headers=headers)
        monkeypatch.setattr(guarded[1].state.models.default.patch, "resolve", broken)
        failed = client.post("/generate", json={"prompt": secret, "max_new_tokens": 2}, headers=headers)
        assert client.get("/models", headers=headers).status_code == 200  # by then the lines before are written
    assert (failed.status_code, failed.json()["error"]["message"]) == (500, "internal error")
    assert failed.headers["x-request-id"] == "the-id"
    text = capsys.readouterr().err
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["request_id"] for line in found] == ["the-id"] * len(found)
    assert [(line["status"], line["code"]) for line in found if line["event"] == "request"][:3] == [
        (200, None),
        (400, "invalid_request"),
        (500, "internal_error"),
    ]
    assert "ArithmeticError: broken" in next(line for line in found if line["event"] == "request_failed")["exception"]
    assert "secret" not in text
    assert "ann-key" not in text


def test_console_lines_show_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(prompt: str) -> None:
        raise ArithmeticError("broken")

    words = ("my", "secret", "prompt")
    try:
        fails(" ".join(words))
    except ArithmeticError as error:
        with logging_as("console"):
            structlog.get_logger().error("request_failed", exc_info=error)
    text = capsys.readouterr().err
    assert "ArithmeticError" in text
    assert "my secret prompt" not in text


def test_prompts_are_logged_where_asked_for(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(checkpoints, log_prompts=True) as (url, _), logging_as("json"):
        httpx.post(f"{url}/generate", json={"prompt": "spoken aloud", "max_new_tokens": 1})
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["prompts"] for line in found if line["event"] == "prompts"] == [["spoken aloud"]]
