"""Captured decode steps, without a card: recorded and replayed, over attention in plain torch by the kernel's tensors."""

from __future__ import annotations

import pytest
import torch

from patches import parse, patched
from patches.attention.paged.decode import DecodeStep
from patches.attention.paged.launch import Blocks
from service.engine.adapter import graphs
from tests.models import by_tier, tiny_model
from tests.patches.attention.paged import by_tables
from tests.recording import Recorder
from tests.service.engine.graphs import CAPTURED, LIMITS, TRITON, run
from tests.service.engine.test_paged_attention import every_encoding, prompts_for

FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "bloom", "gemma2", "diffllama")
SPLIT = 8


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Steps are recorded, attention is in plain torch, and a part of a sequence is small."""
    recorder = Recorder()
    monkeypatch.setattr(graphs, "CudaCapture", lambda: recorder)
    monkeypatch.setattr("patches.attention.paged.launch.attend", by_tables.attend)
    monkeypatch.setattr("patches.attention.paged.launch.blocks_for", lambda *_: Blocks(32, 16, SPLIT))
    monkeypatch.setattr("patches.attention.paged.decode.SPLIT", SPLIT)
    return recorder


@pytest.mark.parametrize("family", by_tier(FAMILIES))
def test_replayed_steps_have_the_tokens_of_ordinary_ones(family: str, recorder: Recorder) -> None:
    """Every encoding in one batch, past edges of pages and of parts; requests end one after another."""
    with patched(tiny_model(family)[1]) as patch:
        methods = every_encoding(patch)
        prompts = prompts_for(methods, 24)
        new = [4 + 3 * (index % 4) for index in range(len(methods))]
        captured = run(patch, CAPTURED, methods, prompts, new)
        ordinary = run(patch, TRITON, methods, prompts, new)
    assert captured.failures == []
    assert captured.equals(ordinary)
    assert captured.count("captured") == len(recorder.graphs) > 1
    assert captured.count("replayed") == sum(graph.replays for graph in recorder.graphs) > 1
    assert ordinary.count("none") == sum(ordinary.steps.values())
