"""Metrics for Prometheus and spans for a trace collector."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send
from structlog.testing import CapturingLogger

from patches import METHODS
from service import context, tracing
from service.api.http import scope
from service.app import create_app
from service.cli.server import StartFailed
from service.metrics import Metrics
from service.settings import Settings
from tests.service.conftest import TEXT
from tests.service.serving import engine_of, serving, wait_for

LONG = [5, 6, 7]
"""A prompt that the tiny model goes on from for hundreds of tokens."""


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints) as server:
        yield server


def samples(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = httpx.get(f"{url}/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(url: str, name: str, **labels: str) -> float:
    return samples(url).get((f"ropeway_{name}", tuple(sorted(labels.items()))), 0.0)


def test_tokens_reasons_and_times_are_counted_by_model_and_method(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    labels = {"model_name": "tiny", "pe_method": "linear"}
    body = {"prompt": LONG, "pe": {"method": "linear", "factor": 2}, "max_new_tokens": 5}
    result = httpx.post(f"{url}/generate", json=body).json()["results"][0]
    tokens = result["usage"]["completion_tokens"]
    assert value(url, "prompt_tokens_total", **labels) == 3
    assert value(url, "generation_tokens_total", **labels) == tokens
    assert value(url, "request_success_total", **labels, finished_reason=result["finish_reason"]) == 1
    once = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time")
    for name in (*once, "request_decode_time"):
        assert value(url, f"{name}_seconds_count", **labels) == 1, name
    assert value(url, "inter_token_latency_seconds_count", **labels) == tokens - 1
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    total = sum(value(url, f"{name}_seconds_sum", **labels) for name in parts)
    assert total == pytest.approx(value(url, "e2e_request_latency_seconds_sum", **labels), abs=0.05)
    first = value(url, "time_to_first_token_seconds_sum", **labels)
    assert first == pytest.approx(sum(value(url, f"{n}_seconds_sum", **labels) for n in parts[:2]), abs=0.01)


def test_stops_and_clients_that_leave_are_told_apart(served: tuple[str, FastAPI]) -> None:
    url, app = served
    labels = {"model_name": "tiny", "pe_method": "ntk"}
    body = {"prompt": LONG, "pe": {"method": "ntk", "factor": 2}, "max_new_tokens": 1500}
    text = httpx.post(f"{url}/generate", json=body | {"max_new_tokens": 8}).json()["results"][0]["text"]
    httpx.post(f"{url}/generate", json=body | {"stop": text[1:3]})
    assert value(url, "request_success_total", **labels, finished_reason="stop") == 1
    gone = {"model_name": "tiny", "pe_method": "default", "finished_reason": "abort"}
    before = value(url, "request_success_total", **gone)
    with httpx.stream(
        "POST", f"{url}/generate", json={"prompt": LONG, "max_new_tokens": 800, "stream": True}
    ) as stream:
        next(stream.iter_lines())
    wait_for(lambda: not (app.state.traffic.in_flight or engine_of(app).load()["running"]))
    assert value(url, "request_success_total", **gone) == before + 1


def test_load_is_shown_while_it_lasts(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    assert value(url, "num_requests_running", model_name="tiny") == 0
    body = {"prompt": LONG, "max_new_tokens": 1800, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        with httpx.stream("POST", f"{url}/generate", json=body):
            assert value(url, "num_requests_running", model_name="tiny") == 1
            assert value(url, "num_requests_waiting", model_name="tiny") == 1
            assert 0 < value(url, "kv_cache_usage_perc", model_name="tiny") <= 1


def test_scored_tokens_and_prefix_hits(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    labels = {"model_name": "tiny", "pe_method": "dynamic"}
    method = {"method": "dynamic", "factor": 2}
    httpx.post(f"{url}/perplexity", json={"input": TEXT[:600], "methods": [method], "lengths": [32, 64]})
    assert value(url, "perplexity_tokens_total", **labels) == 31 + 63  # BOS comes beside the document's tokens
    for expected in (0, 96):
        httpx.post(f"{url}/generate", json={"prompt": [7] * 100, "pe": method, "max_new_tokens": 1})
        assert value(url, "prefix_cache_hits_total", **labels) == expected


def test_refusals_are_counted_by_reason(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    before = {
        reason: value(url, "requests_rejected_total", reason=reason) for reason in ("not_found", "invalid_request")
    }
    httpx.get(f"{url}/nowhere")
    httpx.post(f"{url}/generate", json={})
    for reason, count in before.items():
        assert value(url, "requests_rejected_total", reason=reason) == count + 1


def test_a_stream_that_its_client_leaves_is_logged_and_counted(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = served
    log = CapturingLogger()
    monkeypatch.setattr(scope, "log", log)
    before = value(url, "requests_rejected_total", reason="client_disconnected")
    body = {"prompt": TEXT[:40], "max_new_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    httpx.post(f"{url}/generate", json=body | {"max_new_tokens": 1})  # read to its end
    wait_for(lambda: value(url, "requests_rejected_total", reason="client_disconnected") == before + 1)
    lines = [(call.kwargs["status"], call.kwargs["code"]) for call in log.calls if call.args == ("request",)]
    assert [line for line in lines if line != (200, None)] == [(499, "client_disconnected")]
    assert (200, None) in lines


@pytest.mark.parametrize(("failure", "code"), [("engine_failed", "engine_failed"), (None, "client_disconnected")])
def test_a_failure_that_its_client_did_not_read_counts_as_itself(
    failure: str | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        context.current().error_code = failure
        await send({"type": "http.response.body", "body": b"part", "more_body": True})

    async def nothing(*_: Any) -> Any: ...

    log, metrics = CapturingLogger(), Metrics("")
    monkeypatch.setattr(scope, "log", log)
    layer = scope.RequestScope(stream, Settings(_env_file=None, model="m"), metrics, scope.Traffic())
    asyncio.run(layer({"type": "http", "method": "POST", "path": "/generate", "headers": []}, nothing, nothing))
    assert [(call.kwargs["status"], call.kwargs["code"]) for call in log.calls] == [(499, code)]
    assert metrics.rejected.labels(code)._value.get() == 1


def test_labels_are_bounded(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    for name in ("x" * 50, "nonsense"):
        httpx.post(f"{url}/generate", json={"prompt": "a", "pe": {"method": name}})
        httpx.post(f"{url}/generate", json={"prompt": "a", "model": name})
    labels = [dict(labels) for _, labels in samples(url)]
    assert {label["pe_method"] for label in labels if "pe_method" in label} <= set(METHODS)
    assert {label["model_name"] for label in labels if "model_name" in label} <= {"tiny", "tiny-alibi"}


@pytest.mark.slow
def test_two_servers_in_one_process_count_for_themselves(served: tuple[str, FastAPI], checkpoints: Path) -> None:
    url, _ = served
    labels = {"model_name": "tiny", "pe_method": "default"}
    with serving(checkpoints) as (other, _):
        before = value(url, "prompt_tokens_total", **labels)
        httpx.post(f"{other}/generate", json={"prompt": LONG, "max_new_tokens": 1})
        assert value(other, "prompt_tokens_total", **labels) == 3
        assert value(url, "prompt_tokens_total", **labels) == before


def test_a_port_of_its_own(checkpoints: Path) -> None:
    with serving(checkpoints, metrics_port=0, api_keys="k") as (url, app):
        port = app.state.metrics.port
        assert "ropeway_num_requests_running" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert httpx.get(f"{url}/metrics", headers={"x-api-key": "k"}).status_code == 404
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_openmetrics_where_asked_for(served: tuple[str, FastAPI]) -> None:
    answer = httpx.get(f"{served[0]}/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.slow
def test_requests_become_spans(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    install = tracing.install
    monkeypatch.setattr(tracing, "install", lambda app, settings: install(app, settings, exporter))
    with serving(checkpoints) as (url, app):
        for path in ("/models", "/health", "/metrics", "/nowhere"):
            httpx.get(f"{url}{path}", headers={"X-Request-Id": "asked-for"})
        body = {"prompt": "a secret", "max_new_tokens": 20, "stream": True}
        streamed = httpx.post(f"{url}/generate", json=body, headers={"X-Request-Id": "streamed"})
        wait_for(lambda: not app.state.traffic.in_flight)
        time.sleep(0.1)  # the span ends after the request does
        app.state.tracer_provider.force_flush()
        spans = exporter.get_finished_spans()
    assert streamed.text.count("data: ") > 10
    assert [span.name for span in spans] == ["GET /models", "GET", "POST /generate"], "one a request"
    assert [span.attributes["ropeway.request_id"] for span in spans] == ["asked-for", "asked-for", "streamed"]
    assert "secret" not in "".join(span.to_json() for span in spans)


def test_no_endpoint_no_tracing(served: tuple[str, FastAPI]) -> None:
    assert not hasattr(served[1].state, "tracer_provider")


def test_an_endpoint_without_the_extra_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry."):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(tracing.TracingUnavailable, match=r"the extra `otel`"):
        create_app(Settings(_env_file=None, otel_endpoint="http://localhost:4318"))


def test_a_taken_metrics_port_stops_the_start(served: tuple[str, FastAPI], checkpoints: Path) -> None:
    port = int(served[0].rsplit(":", 1)[1])
    with pytest.raises(StartFailed), serving(checkpoints, metrics_port=port):
        pass


def test_every_sample_of_one_server_among_several_names_it(checkpoints: Path) -> None:
    with serving(checkpoints, servers=2) as (url, app):
        httpx.post(f"{url}/generate", json={"prompt": LONG, "max_new_tokens": 5})
        found = samples(url)
        replicas = {dict(labels).get("replica") for _, labels in found}
        assert replicas == {app.state.settings.replica_name}
        labels = {"model_name": "tiny", "pe_method": "default"}
        assert value(url, "prompt_tokens_total", **labels, replica=app.state.settings.replica_name) == 3
