"""SIGTERM: no new work, running work finishes or fails, exit code 0, no process left."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from service.api.http import draining
from service.api.http.draining import DrainingServer
from service.api.http.scope import Traffic
from tests.service.serving import LONG, SHORT, ends, events, generate, process, token_ids, wait_for

SETTINGS = ("cache_tokens=8192", "log_format=json")


@pytest.mark.slow
def test_sigterm_lets_requests_finish_and_refuses_new_ones(checkpoints: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = process(checkpoints / "tiny", *SETTINGS, "shutdown_grace_s=30", log=log)
    with server as (running_process, url), ThreadPoolExecutor(10) as pool:
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
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(second: signal.Signals, checkpoints: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = process(checkpoints / "tiny", *SETTINGS, "shutdown_grace_s=100", "max_new_tokens=8000", log=log)
    with server as (running_process, url), httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": LONG, "max_new_tokens": 7000, "stream": True}
        with client.stream("POST", "/generate", json=body) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line.startswith("data: "))
            running_process.send_signal(signal.SIGTERM)
            wait_for(lambda: '"draining"' in log.read_text())
            assert running_process.poll() is None
            running_process.send_signal(second)
            assert ends(running_process, 20) == 128 + second
            with pytest.raises(httpx.TransportError):
                list(lines)
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "stopped_at_once"


def test_a_second_signal_inside_a_log_line_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    line, written, exit_codes = Lock(), Queue[bool](), Queue[int]()
    write = lambda *_, **__: written.put(line.acquire(timeout=5))  # noqa: E731
    monkeypatch.setattr(draining.log, "warning", write, raising=False)
    monkeypatch.setattr(draining.os, "_exit", exit_codes.put)
    app = FastAPI()
    app.state.traffic = Traffic()
    server = DrainingServer(uvicorn.Config(app), app, grace_s=100)
    server.handle_exit(signal.SIGTERM, None)
    with line:
        server.handle_exit(signal.SIGTERM, None)
    assert written.get(timeout=10)
    assert exit_codes.get(timeout=10) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_sigterm_fails_what_is_left_when_the_grace_is_over(checkpoints: Path, tmp_path: Path) -> None:
    settings = (*SETTINGS, "shutdown_grace_s=0.3", "max_scored_tokens=100000000", "max_new_tokens=8000")
    server = process(checkpoints / "tiny", *settings, log=tmp_path / "log")
    with server as (running_process, url), ThreadPoolExecutor(3) as pool:
        scoring: dict[str, Any] = {"input": "python-reference", "lengths": {"start": 1000, "stop": 2000, "step": 4}}
        scoring["methods"] = [{"method": "dynamic", "factor": 2}]
        inside = pool.submit(httpx.post, f"{url}/perplexity", json=scoring, timeout=30)
        stream = pool.submit(events, url, prompt=LONG, max_new_tokens=7000)
        wait_for(lambda: 'running{model_name="tiny"} 1.0' in httpx.get(f"{url}/metrics").text)
        running_process.send_signal(signal.SIGTERM)
        answer = inside.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert stream.result()[-1][1]["error"]["code"] == "shutting_down"
        assert ends(running_process, 10) == 0
