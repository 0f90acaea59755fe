"""The code for CUDA, on tensors that say they are there: no operation mixes devices or lacks a kernel."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from patches import Method, Patched, parse, patched
from patches.attention.paged import triton
from service.engine.choice import EngineChoice
from service.engine.request import SamplingParams
from service.engine.verification import _check
from service.evaluation.scoring.token_scores import prompt_scores
from tests.card import Wait, WrongDevice, card
from tests.methods import Fields
from tests.models import VOCAB_SIZE, tiny_model
from tests.recording import ATTENTION
from tests.service.engine.adapter.test_paged_attention import every_encoding, prompts_for
from tests.service.engine.cards.engines import on_card, recorded_on_card
from tests.service.engine.cards.graphs import CAPTURED, LIMITS, TRITON, Run, requests_of, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, and tests of its own run on it")

LOOP = EngineChoice()
FOR_TOKENS = {("read", "input_outputs.py"), ("synchronize", "ahead.py")}
"""Waits for the tokens of ordinary steps and of replayed ones."""
DRAWN = (SamplingParams(), SamplingParams(temperature=0.7, top_k=5), SamplingParams(temperature=1.1, top_p=0.9))

WINDOWS: list[Fields] = [
    {"method": "default"},
    {"method": "streaming", "sink_tokens": 4, "window": 512},
    {"method": "lm_infinite", "n_global": 4, "n_local": 512, "limit_distance": 512},
    {"method": "alibi"},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 512},
]


@pytest.fixture(autouse=True)
def _recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_on_card(monkeypatch)


def test_no_kernel_of_triton_runs_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that an earlier test has imported."""
    monkeypatch.setattr(triton, "kernel", object(), raising=False)
    recorded_on_card(monkeypatch)
    from patches.attention.paged.triton import kernel

    assert vars(kernel).keys() == {*ATTENTION, "INTERPRETED"}


def generated(patch: Patched, choice: EngineChoice) -> Run:
    """Every encoding in one batch; requests end one after another."""
    methods = every_encoding(patch)
    new = [4 + 3 * (index % 4) for index in range(len(methods))]
    return run(patch, choice, methods, prompts_for(methods, 24), new)


@pytest.mark.parametrize(
    ("family", "choice"),
    [(name, LOOP) for name in ("llama", "gemma3")]
    + [(name, CAPTURED) for name in ("llama", "gemma3", "gpt_oss", "deepseek_v3")],
)
def test_every_encoding_generates_on_a_card(family: str, choice: EngineChoice) -> None:
    model = tiny_model(family)[1]
    with patched(model) as patch:
        expected = generated(patch, TRITON if choice is CAPTURED else choice)
    with on_card(model) as (_, patch):
        found = generated(patch, choice)
    assert found.equals(expected)
    assert found.failures == []
    assert (found.count("replayed") > 1) == (choice is CAPTURED)


@pytest.mark.parametrize("count", [None, 3], ids=["many", "few"])
def test_a_replayed_step_waits_for_its_tokens_only(count: int | None) -> None:
    """And no other step waits for an upload, except for encodings that are new. Few requests go ahead."""
    waits: dict[str, list[Wait]] = {}
    with on_card(tiny_model("llama")[1]) as (made, patch):
        methods = every_encoding(patch)[:count]
        requests = requests_of(patch, methods, prompts_for(methods, 24), [24] * len(methods))
        for number, request in enumerate(requests):
            request.sampling = DRAWN[number % len(DRAWN)]
        steps: Counter[str] = Counter()

        def counted(use: str, _: str) -> None:
            """Called when a step has drawn its tokens; the host gets them afterwards, before the next step."""
            steps[use] += 1
            waits.setdefault(use, []).extend(made.waits)
            made.waits.clear()

        engine = CAPTURED.built(patch, LIMITS, counted)
        made.waits.clear()
        engine.run_to_end(requests)
    assert steps["replayed"] > 3
    assert {Path(wait.place).name.partition(":")[0] for wait in waits["replayed"]} <= {"ahead.py", "input_outputs.py"}
    every = [wait for use in waits.values() for wait in use]
    for_tokens = [each for each in every if (each.kind, Path(each.place).name.partition(":")[0]) in FOR_TOKENS]
    assert len(for_tokens) == steps.total() - 1
    assert [wait for wait in every if wait.kind == "copy" and "slots.py" not in wait.place] == []


def scored(patch: Patched) -> list[np.ndarray]:
    """Log-probabilities of a text under every encoding, in chunks."""
    ids = torch.randint(3, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    return [score(patch, method, ids, 16) for method in every_encoding(patch)]


def score(patch: Patched, method: Method, ids: list[int], chunk: int) -> np.ndarray:
    """Log-probabilities of a text, and of two other tokens in each place."""
    steps = prompt_scores(patch, patch.resolve(method, len(ids)), ids, chunk, top=2, with_next=True)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return np.concatenate((end.value.logprobs[:, None], end.value.top_logprobs), 1)


def test_every_encoding_scores_on_a_card() -> None:
    model = tiny_model("llama")[1]
    with patched(model) as patch:
        expected = scored(patch)
    with on_card(model) as (_, patch):
        found = scored(patch)
    assert np.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", WINDOWS, ids=str)
def test_a_long_text_by_chunks_has_the_same_scores(fields: Fields, dtype: torch.dtype) -> None:
    """The last queries of a chunk reach none of the keys that the first part of a block has."""
    model = tiny_model("llama")[1].to(dtype)
    ids = torch.randint(3, VOCAB_SIZE, (1500,), generator=torch.Generator().manual_seed(2)).tolist()
    with patched(model) as patch:
        expected = score(patch, parse(fields), ids, 900)
    with on_card(model) as (_, patch):
        found = score(patch, parse(fields), ids, 900)
    assert np.allclose(found, expected, atol=1e-3 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("choice", [CAPTURED, EngineChoice("padded"), EngineChoice("padded", together=False)], ids=str)
def test_the_check_at_the_start_runs_on_a_card(choice: EngineChoice) -> None:
    with on_card(tiny_model("llama")[1]) as (_, patch):
        _check(patch, choice, [5, 9, 7, 3] * 5)


def test_operations_that_mix_devices_fail() -> None:
    with card():
        ours, theirs = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(WrongDevice, match="tensors of both devices"):
            ours + theirs
        with pytest.raises(WrongDevice, match="by an index of the card"):
            theirs[ours.long()]
        assert (ours + theirs.to("cuda") + 1.0).sum().item() == 9.0


def test_waits_are_counted() -> None:
    with card() as made:
        pinned, ours = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
        ours.copy_(pinned, non_blocking=True)
        pinned[:2].to("cuda", non_blocking=True)
        pinned.copy_(ours, non_blocking=True)
        assert made.waits == []
        torch.ones(3).copy_(ours, non_blocking=True)
        ours.copy_(pinned)
        ours.copy_(torch.ones(3), non_blocking=True)
        torch.tensor([1], device="cuda")
        assert [wait.kind for wait in made.waits] == ["copy"] * 4
        assert ours.tolist() == [1.0] * 3
        ours[ours > 0.5]
        assert [wait.kind for wait in made.waits[4:]] == ["read"] * 2
