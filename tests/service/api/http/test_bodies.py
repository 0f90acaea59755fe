"""Bodies: bounded by route, checked off the event loop, refused before they cost anything."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.http import routing
from service.api.http.routing import MOST_FIELDS, MOST_KEYS, MOST_VALUES, check_shape, count
from service.errors import ApiError, check_text
from tests.service.serving import SHORT, idle, serving, wait_for

JSON = {"Content-Type": "application/json"}
FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints) as server:
        yield server


FLOODS: dict[str, tuple[str, dict[str, Any] | bytes, str | None]] = {
    "bad token ids": ("/generate", {"prompt": ["a"] + [1] * 250_000}, "prompt.1"),
    "token ids that are none": ("/generate", {"prompt": [1] + ["a"] * 60_000}, "prompt.1"),
    "bad ids to detokenize": ("/detokenize", {"tokens": [-1] * 250_000}, "tokens.0"),
    "unknown keys": ("/generate", {"prompt": "a"} | {f"k{n}": 1 for n in range(100_000)}, None),
    "unknown keys of an encoding": ("/generate", {"prompt": "a", "pe": {f"k{n}": 1 for n in range(100_000)}}, None),
    "encodings": ("/generate", {"prompt": "a", "pe": [{"method": "x"}] * 16_000}, "pe"),
    "methods": ("/perplexity", {"methods": [{"method": "linear"}] * 16_000}, "methods"),
    "methods of a sweep": ("/sweep", {"methods": [{"method": "yarn", "factor": 2}] * 8_000}, "methods"),
    "methods times factors": (
        "/sweep",
        {"methods": [{"method": "yarn", "factor": 2}] * 60, "factors": [1 + n / 64 for n in range(60)]},
        None,
    ),
    "documents": ("/perplexity", {"input": [[1]] * 200_000}, "input"),
    "lengths": ("/perplexity", {"lengths": ["a"] * 60_000}, "lengths"),
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": 1}] * 8_000}, "messages"),
    "strings": ("/generate", {"prompt": ["a"] * 100_000}, None),
    "fields": ("/perplexity", {"methods": [{"method": "linear", "factor": 2}] * MOST_FIELDS}, None),
    "values": ("/generate", b'{"prompt": [' + b"1," * (1 << 18) + b"1]}", None),
    "nesting": ("/generate", b"[" * 1_000_000, None),
}


def test_a_body_without_the_header_of_json_is_asked_for_it(served: tuple[str, FastAPI]) -> None:
    url, app = served
    paths = app.openapi()["paths"]
    routes = [(verb, path) for path, verbs in paths.items() for verb in verbs if "requestBody" in verbs[verb]]
    assert len(routes) > 15
    for verb, path in routes:
        for sent, instead in ((f"{FORM};a=b", f", not '{FORM};a=b'"), ("x" * 999, f", not '{'x' * 64}'"), (None, "")):
            headers = {} if sent is None else {"Content-Type": sent}
            answer = httpx.request(verb, f"{url}{path}", content=b'{"prompt": "a"}', headers=headers)
            expected = f"a body needs the header Content-Type: application/json{instead}"
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, expected), path
    assert httpx.post(f"{url}/generate").json()["error"]["message"] == "body: required"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"prompt": "a", "pe": "yarn:4", "pe": "linear:4"}', "pe"),
        ('{"prompt": "a", "pe": {"method": "yarn", "factor": 4, "factor": 8}}', "factor"),
    ],
)
def test_a_field_that_is_given_twice_is_refused(served: tuple[str, FastAPI], path: str, body: str, name: str) -> None:
    answer = httpx.post(served[0] + path, content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"'{name}' is given twice in an object"
    assert answer.json()["error"]["param"] == name


def test_a_compressed_body_is_refused_as_such(served: tuple[str, FastAPI]) -> None:
    base, _ = served
    body = gzip.compress(b'{"prompt": "a"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = httpx.post(f"{base}/generate", content=body, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], reply.headers["accept-encoding"]) == (
        415,
        "unsupported_encoding",
        "identity",
    )
    assert "'gzip'" in error["message"]
    plain = httpx.post(f"{base}/generate", json={"prompt": "a"}, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200
    assert httpx.post(f"{base}/generate", json={"prompt": "a"}, headers={"Content-Encoding": ""}).status_code == 200


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/completions", "did you mean /v1/completions?"),
        ("//v1/models", "did you mean /v1/models?"),
        ("/v1/embeddings", "see /docs"),
        ("/" + "x" * 3000, "see /docs"),
    ],
)
def test_an_unknown_path_is_named(served: tuple[str, FastAPI], path: str, says: str) -> None:
    base, _ = served
    reply = httpx.get(f"{base}{path}")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "not_found")
    assert error["message"].startswith(f"no route '{path[:100]}")
    assert error["message"].endswith(says)
    assert len(reply.content) < 1000


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_refused_in_a_small_answer(served: tuple[str, FastAPI], name: str) -> None:
    path, body, param = FLOODS[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{served[0]}{path}", content=content, headers=JSON, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert len(answer.content) < 5000
    if param is not None:
        assert error["param"].startswith(param), error


def test_a_flood_of_problems_takes_little_memory(served: tuple[str, FastAPI]) -> None:
    """A problem per entry took 1.6 kB each."""
    content = json.dumps({"prompt": [1] + ["a"] * 250_000}).encode()
    tracemalloc.start()
    try:
        assert httpx.post(f"{served[0]}/generate", content=content, headers=JSON, timeout=120).status_code == 400
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 << 20


def test_large_bodies_are_checked_beside_the_event_loop(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = served
    release, seen = threading.Event(), threading.Event()
    shape = routing.check_shape

    def waiting(value: Any) -> None:
        if len(value["prompt"]) > 1000:
            seen.set()
            release.wait(20)
        shape(value)

    monkeypatch.setattr(routing, "check_shape", waiting)
    found: list[int] = []
    large = threading.Thread(
        target=lambda: found.append(httpx.post(f"{url}/generate", json=SHORT | {"prompt": "a" * 50_000}).status_code)
    )
    large.start()
    try:
        assert seen.wait(10)
        assert httpx.get(f"{url}/health/live", timeout=5).status_code == 200
        assert httpx.post(f"{url}/generate", json=SHORT, timeout=10).status_code == 200
    finally:
        release.set()
        large.join()
    assert found == [400]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": "a\ud800b"}, "prompt"),
        ("/generate", {"prompt": ["a", "\udfff"]}, "prompt.1"),
        ("/generate", {"prompt": "a", "stop": "\ud83d"}, "stop"),
        ("/perplexity", {"input": "\ud800"}, "input"),
        ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ("/jobs", {"evaluation": "perplexity", "input": "\ud800"}, "input"),
    ],
)
def test_half_a_surrogate_pair_is_no_text(
    served: tuple[str, FastAPI], path: str, body: dict[str, Any], field: str
) -> None:
    answer = httpx.post(f"{served[0]}{path}", content=json.dumps(body), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert "half a surrogate pair" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
def test_a_body_is_utf_8(served: tuple[str, FastAPI], path: str) -> None:
    """By itself, the library of JSON takes halves of pairs as bytes, and UTF-16."""
    for content in (b'{"prompt": "\xed\xa0\x80"}', json.dumps({"prompt": "\ud800"}).encode("utf-16")):
        reply = httpx.post(f"{served[0]}{path}", content=content, headers=JSON)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith("body: not valid JSON: 'utf-8' codec can't decode byte")
    marked = b'\xef\xbb\xbf{"prompt": "a"}'
    assert httpx.post(f"{served[0]}{path}", content=marked, headers=JSON).status_code == 200


def test_whole_pairs_are_text() -> None:
    check_text(json.loads('{"prompt": "\\ud83d\\ude00", "n": [1, null]}'))
    with pytest.raises(ApiError, match=r"prompt\.0: character 2"):
        check_text({"prompt": ["a\ud83d"]})
    with pytest.raises(ApiError, match=r"^body: character 1"):
        check_text({"\ud83d": "\ud83d"})


def test_deep_text_is_read_without_recursion() -> None:
    value: Any = "\ud83d"
    for _ in range(2 * sys.getrecursionlimit()):
        value = [value]
    with pytest.raises(ApiError, match="half a surrogate pair"):
        check_text(value)


def test_marks_are_counted_outside_of_strings() -> None:
    many = MOST_VALUES
    assert count(json.dumps({"input": "a, b" * many}).encode(), b",") == 0
    assert count(json.dumps({"input": 'say "a", "b": \\' * many}).encode(), b":") == 1
    assert count(json.dumps({"input": [1] * many + ["a, b", 'c", "d']}).encode(), b",") == many + 1
    assert count(b'{"a": "\\\\", "b": [' + b"1," * many + b"1]}", b",") == many + 1


def test_shapes() -> None:
    check_shape({"a": [{str(n): n for n in range(MOST_KEYS)}]})
    many = {str(n): n for n in range(MOST_KEYS + 1)}
    inner = {"a": {"b": [[1], [2, many]]}}
    for value, path in ((inner, "a.b.1.1"), ({"logit_bias": many}, "logit_bias"), (many, None)):
        with pytest.raises(ApiError, match=rf"^{path or 'body'}: an object may have at most 256 keys$") as refusal:
            check_shape(value)
        assert refusal.value.param == path
    check_shape({"tools": [{"function": {"parameters": many}}], "structured_outputs": {"json": {"properties": many}}})


def test_routes_have_limits_of_their_own(checkpoints: Path) -> None:
    with serving(checkpoints, max_prompt_bytes=1000, max_body_bytes=4000) as (url, _):
        text = "word " * 400
        for path in ("/generate", "/tokenize", "/v1/completions"):
            answer = httpx.post(f"{url}{path}", json={"prompt": text})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert httpx.post(f"{url}/perplexity", json={"input": text, "lengths": [64]}).status_code == 200
        for path in ("/perplexity", "/jobs"):
            assert httpx.post(f"{url}{path}", json={"input": text * 3}).status_code == 413


def test_bodies_share_a_budget(checkpoints: Path) -> None:
    """The second large body waits for the first one to be answered; a small one does not wait."""
    with serving(checkpoints, max_bodies_bytes=100_000) as (url, app):
        (held,) = app.state.bodies.enter([90_000])
        try:
            large = {"prompt": "a" * 30_000, "timeout_s": 0.5}
            assert httpx.post(f"{url}/tokenize", json=SHORT | {"prompt": "small"}).status_code == 400
            assert httpx.post(f"{url}/generate", json=SHORT).status_code == 200
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/generate", json=SHORT | large, timeout=0.5)
        finally:
            held.leave()
        wait_for(lambda: idle(app))
        assert app.state.bodies.reserved == 0


def test_a_redirect_never_follows_a_host_header(served: tuple[str, FastAPI]) -> None:
    answer = httpx.get(f"{served[0]}/models/", headers={"Host": "evil.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers
