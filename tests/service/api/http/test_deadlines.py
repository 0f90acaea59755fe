"""Deadlines end work in every phase, and long prompts report their progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError

from service.api.generation.generate import GenerateRequest
from service.api.openai.schemas import ChatRequest
from service.evaluation.perplexity.request import PerplexityRequest
from tests.service.serving import LONG, engine_of, events, generate, idle, serving, wait_for


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints, max_timeout_s=30) as server:
        yield server


def test_a_deadline_ends_generation_scoring_and_streams(served: tuple[str, FastAPI]) -> None:
    url, app = served
    long = {"prompt": [LONG] * 8, "max_new_tokens": 1900, "timeout_s": 1}
    scoring: dict[str, Any] = {
        "input": "python-reference",
        "lengths": {"start": 824, "stop": 1024, "step": 1},
        "timeout_s": 2,
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
        assert time.monotonic() - began < 40
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


@pytest.mark.parametrize("body", [GenerateRequest, ChatRequest, PerplexityRequest])
def test_every_route_takes_any_deadline_above_0(body: type[BaseModel]) -> None:
    prompts = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    fields = {name: value for name, value in prompts.items() if name in body.model_fields}
    body.model_validate(fields | {"timeout_s": 0.005})
    with pytest.raises(ValidationError, match="greater than 0"):
        body.model_validate(fields | {"timeout_s": 0})


def test_a_long_prompt_tells_how_far_it_has_been_read(served: tuple[str, FastAPI]) -> None:
    streamed = events(served[0], prompt=[(3 * n) % 380 + 2 for n in range(500)], max_new_tokens=3)
    assert [name for name, _ in streamed[:4]] == ["progress", "progress", "progress", "message"]
    assert [data for _, data in streamed[:3]] == [
        {"index": 0, "prompt_tokens_done": done, "prompt_tokens_total": 500} for done in (128, 256, 384)
    ]
    assert "progress" not in {name for name, _ in streamed[3:]}
