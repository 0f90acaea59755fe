"""Engines that capture decode steps, on a card or by a recorder, and what their steps had of a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from patches import Method, Patched
from patches.attention.paged.triton.launch import Blocks
from service.engine.adapter.cards import graphs
from service.engine.choice import EngineChoice
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest, SamplingParams
from tests.card import download, on_host
from tests.patches.attention.paged import by_tables
from tests.recording import Recorder

TRITON = EngineChoice(attention="triton")
CAPTURED = replace(TRITON, graphs=True)
SPLIT = 8
"""Keys of a part, in steps that are recorded."""

LIMITS = EngineLimits(512, 0, page_size=4, max_batch_tokens=48, max_requests_per_batch=32)


@dataclass
class Run:
    """Tokens and log-probabilities of every request; steps by (graph, variant of the kernel)."""

    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, use: str) -> int:
        return sum(count for (graph, _), count in self.steps.items() if graph == use)

    def equals(self, other: Run, atol: float = 1e-4) -> bool:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return self.tokens == other.tokens and all(torch.allclose(*pair, atol=atol) for pair in pairs)


def requests_of(patch: Patched, methods: list[Method], prompts: list[list[int]], new: list[int]) -> list[EngineRequest]:
    """Requests that ask for log-probabilities, each with its own number of new tokens."""
    requests = []
    for method, prompt, count in zip(methods, prompts, new, strict=True):
        resolved = patch.resolve(method, len(prompt) + count)
        slot, window = patch.slots.acquire(resolved), patch.sink_window(resolved)
        sampling = SamplingParams(logprobs=1)
        requests.append(EngineRequest(prompt, slot, (None, None, resolved), count, sampling, sink_window=window))
    return requests


def run(
    patch: Patched,
    choice: EngineChoice,
    methods: list[Method],
    prompts: list[list[int]],
    new: list[int],
    limits: EngineLimits = LIMITS,
) -> Run:
    """All requests through one engine, each with its own number of new tokens."""
    requests = requests_of(patch, methods, prompts, new)
    steps: Counter[tuple[str, str]] = Counter()
    engine = choice.built(patch, limits, lambda use, variant: steps.update([(use, variant)]))
    tokens = engine.run_to_end(requests)
    for request in requests:
        patch.slots.release(request.slot)
    logprobs = [torch.tensor([step.logprob for step in request.logprobs]) for request in requests]
    return Run(tokens, logprobs, steps, list(getattr(engine, "failures", [])))


def recorded(monkeypatch: pytest.MonkeyPatch, recorder: Recorder | None = None) -> Recorder:
    """Steps are recorded, attention is in plain torch, and a part of a sequence is small."""
    recorder = recorder or Recorder()

    def attended(query: torch.Tensor, *given: Any) -> torch.Tensor:
        """One call of a graph, as the kernel is: a replay has the tensors and the numbers of its capture."""
        query, key_pages, value_pages, plan, layer = download([query, *given])
        with on_host():
            out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
        recorder.call(lambda: out.copy_(by_tables.attend(query, key_pages, value_pages, plan, layer)))
        return out

    monkeypatch.setattr(graphs, "CudaCapture", lambda: recorder)
    monkeypatch.setattr("patches.attention.paged.triton.launch.attend", attended)
    monkeypatch.setattr("patches.attention.paged.triton.launch.write", by_tables.write)
    monkeypatch.setattr("patches.attention.paged.triton.launch.blocks_for", lambda *_: Blocks(32, 16, SPLIT))
    monkeypatch.setattr("patches.attention.paged.decode.SPLIT", SPLIT)
    return recorder
