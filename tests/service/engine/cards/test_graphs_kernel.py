"""Captured decode steps on the Triton kernel: CUDA graphs on a card, recorded ones under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from patches import parse, patched
from service.engine.adapter.cards import graphs
from service.engine.adapter.runner import RequestRunner
from service.engine.request import EngineRequest, SamplingParams
from service.engine.verification import verify
from tests.kernels import device_of_kernels
from tests.models import tiny_model
from tests.recording import Recorder
from tests.service.engine.adapter.test_paged_attention import every_encoding, prompts_for
from tests.service.engine.cards.graphs import CAPTURED, LIMITS, TRITON, run

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = device_of_kernels()
on_a_card = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA")

FAMILIES = ["llama", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "gemma2", "bloom", "diffllama"]
"""The interpreter takes minutes for each."""

WITH_EXPERTS = {"gpt_oss", "deepseek_v3", "llama4"}
"""In float32, torch's grouped products may read the sizes of groups on the host, which no graph can contain."""


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda":
        monkeypatch.setattr(graphs, "CudaCapture", Recorder)


@pytest.mark.parametrize("family", FAMILIES if DEVICE.type == "cuda" else FAMILIES[:1])
def test_replayed_steps_have_the_tokens_of_ordinary_ones(family: str) -> None:
    with patched(tiny_model(family)[1].to(DEVICE)) as patch:
        methods = every_encoding(patch)[:: 1 if DEVICE.type == "cuda" else 3]
        prompts = prompts_for(methods, 20)
        new = [4 + 4 * (index % 2) for index in range(len(methods))]
        captured = run(patch, CAPTURED, methods, prompts, new)
        ordinary = run(patch, TRITON, methods, prompts, new)
    assert captured.equals(ordinary, atol=1e-3)
    if family in WITH_EXPERTS and captured.failures:
        assert captured.count("failed") > 1
        return
    assert captured.failures == []
    assert captured.count("replayed") > 0


def test_slots_lengths_and_rows_change_between_replays() -> None:
    """Requests join and leave, pass edges of pages and of parts, and give back pages."""
    fields = {"method": "streaming", "sink_tokens": 5, "window": 11}, {"method": "default"}, {"method": "self_extend"}
    methods = [parse(each) for each in fields[:2]] * 3 + [parse({**fields[2], "group_size": 4, "neighbor_window": 8})]
    length = 500 if DEVICE.type == "cuda" else 10
    limits = replace(LIMITS, cache_tokens=8192, max_requests_per_batch=4)
    with patched(tiny_model("llama")[1].to(DEVICE)) as patch:
        prompts = [prompt[:5] * (length // 5) for prompt in prompts_for(methods, 40, seed=7)]
        new = [30, 4, 9, 6, 3, 20, 8] if DEVICE.type == "cuda" else [7, 2, 4, 3, 2, 5, 4]
        captured = run(patch, CAPTURED, methods, prompts, new, limits)
        assert captured.failures == []
        assert captured.tokens == run(patch, TRITON, methods, prompts, new, limits).tokens
    assert captured.count("replayed") > 1
    assert captured.count("captured") > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32])
def test_the_check_at_start_takes_graphs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of padded batches round otherwise in half precision, so the check compares numbers and not tokens."""
    if DEVICE.type != "cuda":
        monkeypatch.setattr("service.engine.verification.choices", lambda *_: (CAPTURED,))
    with patched(tiny_model("llama")[1].to(DEVICE, dtype)) as patch:
        assert verify(patch, "triton") == CAPTURED


# On a card


class Failing(graphs.CudaCapture):
    """The first capture fails at its end."""

    def __init__(self, fault: Callable[[], object]) -> None:
        super().__init__()
        self._faults = [fault]

    def __call__(self, forward: Callable[[], None]) -> graphs.Graph:
        faults, self._faults = self._faults, []

        def with_faults() -> None:
            forward()
            for fault in faults:
                fault()

        return super().__call__(with_faults)


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "memory": (lambda: torch.empty(1 << 50, device=DEVICE), "out of memory"),
    "a number read back": (lambda: torch.ones(1, device=DEVICE).item(), "captur"),
}


@on_a_card
@pytest.mark.parametrize("fault", FAULTS)
def test_a_capture_that_fails_costs_its_graph_only(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, prompts, new = [parse({"method": "default"})] * 2, [[5, 9, 7], [8, 3]], [6, 20]
    fails, message = FAULTS[fault]
    with patched(tiny_model("llama")[1].to(DEVICE)) as patch:
        ordinary = run(patch, TRITON, methods, prompts, new)
        monkeypatch.setattr(graphs, "CudaCapture", lambda: Failing(fails))
        captured = run(patch, CAPTURED, methods, prompts, new)
    assert captured.equals(ordinary, atol=1e-3)
    assert len(captured.failures) == 1
    assert message in captured.failures[0]
    assert captured.count("failed") > 1
    assert captured.count("replayed") > 1, "the stream captures again"


@on_a_card
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing_in_a_replayed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the inputs to the drawn tokens; their transfer comes after."""
    steps = 0
    ordinary = RequestRunner.replay

    def watched(self: RequestRunner) -> bool:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error" if steps > 4 else "default")
        try:
            return ordinary(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(RequestRunner, "replay", watched)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=1)
    with patched(tiny_model("llama")[1].to(DEVICE)) as patch:
        requests = [EngineRequest([5, 9, 7], 0, (None, None, None), 12, each) for each in (drawn, SamplingParams())]
        CAPTURED.built(patch, LIMITS).run_to_end(requests)
    assert steps > 8
