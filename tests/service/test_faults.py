"""What goes wrong, done on purpose: each fault costs what it touches, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from fastapi import FastAPI

from service.engine.engine import EngineLimits
from service.engine.memory import OutOfMemory, is_out_of_memory
from service.engine.sampling import sample
from tests.service.conftest import TEXT
from tests.service.serving import engine_of, runner_of, serving
from tests.service.test_engine import finish, running

LONG = [5, 6, 7]
"""A prompt that the tiny model goes on from for hundreds of tokens."""

SHORT: dict[str, Any] = {"prompt": LONG, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints, send_timeout_s=1.0, max_timeout_s=30) as server:
        yield server


def generate(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=SHORT | body, timeout=60)


def token_ids(url: str, **body: Any) -> list[int]:
    answer = generate(url, **body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["results"][0]["token_ids"]
    return ids


def events(url: str, path: str = "/generate", **body: Any) -> list[tuple[str, Any]]:
    """(event name, data) of a whole stream."""
    found, name = [], "message"
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, line.removeprefix("data: ")))
                name = "message"
    assert found[-1] == ("message", "[DONE]")
    return [(name, json.loads(data)) for name, data in found[:-1]]


def wait_for(condition: Callable[[], object], seconds: float = 15) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def idle(app: FastAPI) -> bool:
    engine = engine_of(app)
    load = engine.load()
    held = load["running"] + load["waiting"] + load["scoring"] + load["slots_in_use"]
    reserved = engine.generations.reserved + engine.scores.reserved
    return bool(held + reserved + app.state.traffic.in_flight == 0)


# Clients


async def test_two_hundred_clients_vanish_after_their_first_token(served: tuple[str, FastAPI]) -> None:
    url, app = served
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": LONG, "max_new_tokens": 500, "stream": True})
    request = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    before = token_ids(url)

    async def vanish() -> bool:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((request + body).encode())
        await reader.readuntil(b"token_ids")
        await asyncio.sleep(0.01)
        writer.transport.abort()
        return True

    for _ in range(10):
        assert all(await asyncio.gather(*(vanish() for _ in range(20))))
    await asyncio.to_thread(wait_for, lambda: idle(app))
    assert await asyncio.to_thread(token_ids, url) == before
    assert engine_of(app).restarts == 0


PADDING = "x" * (16 << 20)
"""More than the buffers between server and client hold."""


def test_a_client_that_reads_slowly_keeps_nobody_waiting_and_loses_nothing(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(checkpoints, send_timeout_s=30) as (url, app):
        expected = token_ids(url, max_new_tokens=40)
        padding = iter([PADDING])
        model = app.state.models.default
        monkeypatch.setattr(model.patch, "describe", lambda *_: {"padding": next(padding, "")})
        with _stream_without_reading(url, max_new_tokens=40) as connection:
            wait_for(lambda: engine_of(app).generations.reserved)
            wait_for(lambda: engine_of(app).generations.reserved == 0 and engine_of(app).load()["running"] == 0)
            assert token_ids(url, max_new_tokens=40) == expected
            assert app.state.traffic.in_flight >= 1
            received = bytearray()
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                received += connection.recv(1 << 18)
        text = received.decode()
        assert text.count("x" * 1000) >= 1000
        assert [
            t for ids in re.findall(r'"token_ids": ?\[([\d, ]+)\]', text) for t in json.loads(f"[{ids}]")
        ] == expected


def test_a_client_that_never_reads_is_cut_off(served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch) -> None:
    url, app = served
    served_model = app.state.models.default
    monkeypatch.setattr(served_model.patch, "describe", lambda *_: {"padding": PADDING})
    with _stream_without_reading(url, max_new_tokens=2) as connection:
        wait_for(lambda: app.state.traffic.in_flight == 1)
        wait_for(lambda: idle(app))
        connection.settimeout(10)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))  # ends because the server closed it
        assert b"[DONE]" not in received


@contextmanager
def _stream_without_reading(url: str, **body: Any) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(SHORT | body | {"stream": True})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        connection.sendall(f"{head}\r\n\r\n{content}".encode())
        yield connection


# Out of memory


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)
    assert is_out_of_memory(real.value)


def fail_steps(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, when: Callable[[list[Any]], bool], error: Exception
) -> None:
    """Make steps run out of memory ``when`` their batch says so: after the forward pass has written its keys, and
    after the sampler has drawn."""
    inputs = runner_of(app).inputs_and_outputs

    def failing(*args: Any) -> torch.Tensor:
        tokens = sample(*args)
        if when(inputs.requests_in_batch):
            raise error
        return tokens

    monkeypatch.setattr("service.engine.adapter.sample", failing)


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("phase", ["prefill", "decoding"])
def test_out_of_memory_alone_is_507_and_not_tried_again(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, phase: str, error: Exception
) -> None:
    url, app = served
    before = token_ids(url)
    with monkeypatch.context() as fault:
        fail_steps(app, fault, lambda batch: bool(batch[0].state.generated_tokens) == (phase == "decoding"), error)
        answer = generate(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "out_of_memory")
        assert phase in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        streamed = events(url, **SHORT)
        assert streamed[-1][1]["error"]["code"] == "out_of_memory"
        assert len(streamed) == (1 if phase == "prefill" else 2)
    wait_for(lambda: idle(app))
    assert token_ids(url) == before
    assert engine_of(app).restarts == 0


@pytest.mark.parametrize("phase", ["prefill", "decoding"])
def test_out_of_memory_costs_one_request_and_leaves_its_neighbours_exact(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    url, app = served
    blamed = {"prompt": [9] * 400, "max_new_tokens": 40}
    neighbours: list[dict[str, Any]] = [
        {"prompt": LONG, "max_new_tokens": 150},
        {"prompt": LONG, "max_new_tokens": 150, "temperature": 1.0, "seed": 3, "logprobs": 2},
        {"prompt": LONG, "max_new_tokens": 150, "pe": {"method": "linear", "factor": 2}},
    ]
    alone = [generate(url, **body).json()["results"][0] for body in neighbours]
    steps: list[int] = []

    def when(batch: list[Any]) -> bool:
        lengths = [len(future.state.initial_tokens) for future in batch]
        generated = [len(f.state.generated_tokens) for f in batch if len(f.state.initial_tokens) == 400]
        hit = 400 in lengths and len(batch) > 1 and (generated[0] > 3) == (phase == "decoding")
        steps.append(hit)
        return hit

    fail_steps(app, monkeypatch, when, torch.OutOfMemoryError("CUDA out of memory"))
    with ThreadPoolExecutor(4) as pool:
        rest = [pool.submit(generate, url, **body) for body in neighbours]
        wait_for(lambda: engine_of(app).load()["running"] == 3)
        answer = generate(url, **blamed)
        results = [future.result().json()["results"][0] for future in rest]
    assert sum(steps) == 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
    assert "retry-after" in answer.headers
    for one, other in zip(results, alone, strict=True):
        assert one["token_ids"] == other["token_ids"]
        assert len(one["logprobs"] or []) == len(other["logprobs"] or [])
    assert engine_of(app).restarts == 0


async def test_a_failed_step_keeps_no_memory(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        await finish(engine, [2], 1)
        processor: Any = engine._manager.batch_processor
        held: list[Any] = []

        class Tensor:
            """Stands for the activations of the failed step."""

        def failing(*_: object) -> None:
            activations = Tensor()
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")

        processor.model_runner._sample = failing
        with pytest.raises(OutOfMemory):
            await finish(engine, [2, 3, 4] * 40, 6)
        del processor.model_runner._sample
        assert held[0]() is None
        async with asyncio.timeout(10):  # the thread tells of the failure before it has tidied up
            while processor.cache.holders or processor.scheduler.active_requests:
                await asyncio.sleep(0.01)
        assert len((await finish(engine, [2, 3], 4)).token_ids) == 4


def test_out_of_memory_in_scoring_costs_the_scoring(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, app = served
    body = {"input": [5, 6, 7] * 100, "lengths": [256]}
    before = httpx.post(f"{url}/perplexity", json=body).json()["methods"][0]["lengths"]

    def failing(*_: object, **__: object) -> Iterator[int]:
        yield 64
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as fault:
        fault.setattr("service.evaluation.perplexity.token_nll", failing)
        answer = httpx.post(f"{url}/perplexity", json=body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (507, "false")
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(generate, url, max_new_tokens=200)
            wait_for(lambda: engine_of(app).load()["running"] == 1)
            answer = httpx.post(f"{url}/perplexity", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
            assert beside.result().status_code == 200
        assert events(url, "/perplexity", **body)[-1][1]["error"]["code"] == "out_of_memory"
    wait_for(lambda: idle(app))
    assert httpx.post(f"{url}/perplexity", json=body).json()["methods"][0]["lengths"] == before


# The generation thread


def hold_steps(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The thread stays in its next step until the event is set."""
    release = threading.Event()
    manager: Any = engine_of(app)._manager
    monkeypatch.setattr(manager, "_generation_step", lambda: release.wait(30))
    return release


@pytest.fixture(scope="module")
def stalling(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints, stall_timeout_s=1.5) as server:
        yield server


def test_a_thread_that_stalls_under_requests_is_replaced(
    stalling: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, app = stalling
    before, restarts = token_ids(url), engine_of(app).restarts
    stuck = engine_of(app)._manager
    release = hold_steps(app, monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        streaming = pool.submit(events, url, **SHORT)
        answer = generate(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert "retry-after" in answer.headers
        assert streaming.result()[-1][1]["error"]["code"] == "engine_failed"
    assert token_ids(url) == before
    assert engine_of(app).restarts == restarts + 1
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(rf'ropeway_engine_restarts_total{{model_name="tiny"}} {restarts + 1}\.0', metrics)
    release.set()
    wait_for(lambda: not stuck.is_running())  # it ends by itself, and touches nothing
    assert token_ids(url) == before
    wait_for(lambda: idle(app))


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/health/ready"])
def test_probes_tell_of_a_thread_that_stalls_and_replace_it(
    stalling: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    url, app = stalling
    engine, release = engine_of(app), threading.Event()
    lost, restarts = engine._manager, engine.restarts
    monkeypatch.setattr(lost.interleaved, "advance", lambda: release.wait(30) and False)
    refused: list[httpx.Response] = []

    def refuses() -> bool:
        refused.append(httpx.get(f"{url}{path}"))
        return refused[-1].status_code == 503

    wait_for(refuses)
    assert refused[-1].json()["error"]["code"] == "not_ready"
    assert "retry-after" in refused[-1].headers
    assert engine.restarts == restarts + 1
    for probe in ("/health", "/health/ready", "/health/live"):
        assert httpx.get(f"{url}{probe}").status_code == 200
    assert engine.restarts == restarts + 1
    release.set()
    wait_for(lambda: not lost.is_running())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("end", [SystemExit, ArithmeticError])
def test_a_thread_that_dies_is_replaced_with_a_clean_cache(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    url, app = served
    prompt = [(7 * n) % 380 + 2 for n in range(200)]
    before = token_ids(url, prompt=prompt)
    engine = engine_of(app)
    lost, restarts = engine._manager, engine.restarts

    def dies() -> None:
        raise end("killed")

    monkeypatch.setattr(lost, "_generation_step", dies)
    assert generate(url, prompt=prompt).json()["error"]["code"] == "engine_failed"
    wait_for(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
    assert engine._manager is not lost
    assert engine.restarts == restarts + 1
    assert engine.load()["cache_tokens_used"] == 0
    assert token_ids(url, prompt=prompt) == before


async def test_scoring_in_a_stalled_step_fails_too(checkpoints: Path) -> None:
    release = threading.Event()

    def stuck() -> Iterator[int]:
        release.wait(20)
        yield 1

    limits = EngineLimits(2048, 1024, stall_timeout_s=0.3)
    async with running(checkpoints, limits) as engine:
        await finish(engine, [2], 1)
        with pytest.raises(RuntimeError, match="in one step"):
            await engine.run(stuck(), 10, lambda _: None)  # type: ignore[arg-type]
        assert len((await finish(engine, [2, 3], 4)).token_ids) == 4
        assert engine.restarts == 1
        release.set()


# Deadlines


def test_a_deadline_ends_generation_scoring_and_streams(served: tuple[str, FastAPI]) -> None:
    url, app = served
    long = {"prompt": LONG, "max_new_tokens": 1900, "timeout_s": 0.3}
    scoring: dict[str, Any] = {
        "input": "python-reference",
        "lengths": {"start": 1000, "stop": 1024, "step": 1},
        "timeout_s": 0.3,
    }
    scoring["methods"] = [{"method": "dynamic", "factor": 2}]
    for path, body in (("/generate", long), ("/perplexity", scoring)):
        began = time.monotonic()
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (504, "deadline_exceeded", "timeout_s")
        assert answer.headers["x-should-retry"] == "false"
        streamed = events(url, path, **body)
        assert streamed[-1][1]["error"]["code"] == "deadline_exceeded"
        assert len(streamed) > 1
        assert time.monotonic() - began < 8
        wait_for(lambda: idle(app))


def test_waiting_counts_and_the_server_has_a_maximum(served: tuple[str, FastAPI]) -> None:
    url, app = served
    (held,) = engine_of(app).generations.enter([2048])
    try:
        assert generate(url, timeout_s=0.1).status_code == 504
        assert engine_of(app).generations.waiting == 0
    finally:
        held.leave()
    for value in (31, 0, -1):
        answer = generate(url, timeout_s=value)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")
    assert generate(url, timeout_s=30).status_code == 200


# Progress


def test_a_long_prompt_tells_how_far_it_has_been_read(served: tuple[str, FastAPI]) -> None:
    streamed = events(served[0], prompt=[(3 * n) % 380 + 2 for n in range(500)], max_new_tokens=3)
    assert [name for name, _ in streamed[:4]] == ["progress", "progress", "progress", "message"]
    assert [data for _, data in streamed[:3]] == [
        {"index": 0, "prompt_tokens_done": done, "prompt_tokens_total": 500} for done in (128, 256, 384)
    ]
    assert "progress" not in {name for name, _ in streamed[3:]}


# The end of service


@contextmanager
def process(checkpoints: Path, *settings: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`ropeway serve` as a process of its own; its log goes to a file, which never fills up as a pipe does."""
    flags = [flag for setting in (*settings, "cache_tokens=8192", "log_format=json") for flag in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "service.cli",
        "serve",
        "--model",
        str(checkpoints / "tiny"),
        "--port",
        "0",
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as stderr:
        running = subprocess.Popen(command, stderr=stderr, stdout=stderr, env=environment, cwd=checkpoints)
        try:
            wait_for(lambda: "Uvicorn running" in log.read_text() or running.poll() is not None, 60)
            found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            assert found, log.read_text()
            yield running, found[0]
        finally:
            running.kill()
            running.wait()


def ends(running: subprocess.Popen[bytes], within_s: float) -> int:
    children = psutil.Process(running.pid).children(recursive=True)
    code = running.wait(within_s)
    assert not psutil.wait_procs(children, timeout=1)[1]
    return code


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_refuses_new_ones(checkpoints: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process(checkpoints, "shutdown_grace_s=30", log=log) as (running_process, url), ThreadPoolExecutor(10) as pool:
        expected = token_ids(url, max_new_tokens=300)
        inside = [pool.submit(generate, url, max_new_tokens=300) for _ in range(4)]
        streams = [pool.submit(events, url, prompt=LONG, max_new_tokens=300) for _ in range(4)]
        with httpx.Client(base_url=url) as keeps_alive:
            wait_for(lambda: 'running{model_name="tiny"} 8.0' in keeps_alive.get("/metrics").text)
            running_process.send_signal(signal.SIGTERM)
            wait_for(lambda: keeps_alive.get("/health/ready").status_code == 503)
            refused = httpx.post(f"{url}/generate", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert "retry-after" in refused.headers
            assert httpx.get(f"{url}/health/live").status_code == 200
        for answer in inside:
            assert answer.result().json()["results"][0]["token_ids"] == expected
        for stream in streams:
            assert [t for _, data in stream.result() for t in data.get("token_ids", [])] == expected
        assert ends(running_process, 10) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert sum(line.get("event") == "request" and line["status"] == 200 for line in lines) == 9
    assert not [line for line in lines if line["level"] == "error"]


@pytest.mark.slow
def test_sigterm_fails_what_is_left_when_the_grace_is_over(checkpoints: Path, tmp_path: Path) -> None:
    settings = ("shutdown_grace_s=0.3", "max_scored_tokens=100000000")
    with process(checkpoints, *settings, log=tmp_path / "log") as (running_process, url), ThreadPoolExecutor(3) as pool:
        scoring: dict[str, Any] = {"input": "python-reference", "lengths": {"start": 1000, "stop": 2000, "step": 4}}
        scoring["methods"] = [{"method": "dynamic", "factor": 2}]
        inside = pool.submit(httpx.post, f"{url}/perplexity", json=scoring, timeout=30)
        stream = pool.submit(events, url, prompt=LONG, max_new_tokens=1500)
        wait_for(lambda: 'scoring_jobs{model_name="tiny"} 1.0' in httpx.get(f"{url}/metrics").text)
        running_process.send_signal(signal.SIGTERM)
        answer = inside.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert stream.result()[-1][1]["error"]["code"] == "shutting_down"
        assert ends(running_process, 10) == 0


# Bodies


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nothing",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"prompt": "a", "max_new_tokens": 1e400}',
        b'{"prompt": "a", "max_new_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800", "max_new_tokens": 2}',
        b'{"prompt": "a", "pe": ' + b'{"method": ' * 500 + b"}" * 501,
        b'{"prompt": [' + b"true," * 9999 + b"true]}",
        b'{"' + b"k" * 100_000 + b'": 1}',
    ],
    ids=range(11),
)
def test_malformed_bodies_get_a_small_400(served: tuple[str, FastAPI], content: bytes) -> None:
    for path in ("/generate", "/perplexity"):
        answer = httpx.post(f"{served[0]}{path}", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.content) < 5000


def test_oversized_bodies_never_get_inside(checkpoints: Path) -> None:
    with serving(checkpoints, max_body_bytes=1000) as (url, _):
        large = json.dumps(SHORT | {"prompt": TEXT[:2000]}).encode()
        for content in (large, (large[n : n + 100] for n in range(0, len(large), 100))):
            answer = httpx.post(f"{url}/generate", content=content, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers["x-request-id"]


def test_a_body_that_never_ends_is_given_up_with_its_client(served: tuple[str, FastAPI]) -> None:
    url, app = served
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        wait_for(lambda: app.state.traffic.in_flight == 1)
    wait_for(lambda: idle(app))


def test_wrong_routes_and_methods_are_refused_in_shape(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    for method, path, status in (("GET", "/generate", 405), ("POST", "/nowhere", 404), ("PATCH", "/health", 405)):
        answer = httpx.request(method, f"{url}{path}")
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert ("allow" in answer.headers) == (status == 405)
