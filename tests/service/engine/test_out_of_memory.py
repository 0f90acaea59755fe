"""Running out of memory costs one request and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from service.engine.sampling import sample
from service.engine.thread.out_of_memory import OutOfMemory, is_out_of_memory
from tests.service.engine.generating import finished
from tests.service.engine.test_engine import running
from tests.service.serving import (
    LONG,
    SHORT,
    engine_of,
    events,
    generate,
    idle,
    runner_of,
    serving,
    token_ids,
    until,
    wait_for,
)


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints) as server:
        yield server


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
    """Make steps run out of memory ``when`` their batch says so. This happens after the forward pass has written its
    keys, and after the sampler has drawn."""
    inputs = runner_of(app).inputs_and_outputs

    def failing(*args: Any) -> torch.Tensor:
        tokens = sample(*args)
        if when(inputs.requests_in_batch):
            raise error
        return tokens

    monkeypatch.setattr("service.engine.adapter.runner.sample", failing)


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory")]


@pytest.mark.slow
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
    assert engine_of(app).thread.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decoding"])
def test_out_of_memory_costs_one_request_and_leaves_its_neighbours_exact(
    served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    url, app = served
    blamed = {"prompt": [9] * 400, "max_new_tokens": 40}
    neighbours: list[dict[str, Any]] = [
        {"prompt": LONG, "max_new_tokens": 100},
        {"prompt": LONG, "max_new_tokens": 100, "temperature": 1.0, "seed": 3, "logprobs": 2},
        {"prompt": LONG, "max_new_tokens": 100, "pe": {"method": "linear", "factor": 2}},
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
    assert engine_of(app).thread.restarts == 0


async def test_a_failed_step_keeps_no_memory(checkpoints: Path) -> None:
    async with running(checkpoints) as engine:
        await finished(engine, [2], 1)
        processor: Any = engine.thread.manager.batch_processor
        held: list[Any] = []

        class Tensor:
            """Represents the activations of the failed step."""

        def failing(*_: object) -> None:
            activations = Tensor()
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")

        processor.model_runner._sample = failing
        with pytest.raises(OutOfMemory):
            await finished(engine, [2, 3, 4] * 40, 6)
        del processor.model_runner._sample
        # The thread reports the failure before it has tidied up.
        await until(lambda: not (held[0]() or processor.cache.live_keys or processor.scheduler.active_requests))
        assert len((await finished(engine, [2, 3], 4)).token_ids) == 4


@pytest.mark.slow
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
        fault.setattr("service.evaluation.scoring.token_scores.token_scores", failing)
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
