"""Between two replayed steps: rows that are kept, numbers that are expected, and tokens that are handed out later."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.continuous_batching.requests import RequestState

from patches import DecodeStep, DecodeSteps, PagedSequence, parse, patched
from service.engine.adapter.cards.decode_rows import DecodeRows
from service.engine.adapter.cards.processor import StepProcessor
from service.engine.adapter.inputs import SlottedInputs
from service.engine.choice import EngineChoice
from service.engine.engine import Engine
from service.engine.request import EngineRequest, SamplingParams
from service.engine.thread.out_of_memory import OutOfMemory
from tests.methods import Fields
from tests.models import tiny_model
from tests.patches.attention.paged.batches import filled
from tests.recording import Recorder
from tests.service.engine.adapter.test_paged_attention import WINDOWED, prompts_for
from tests.service.engine.cards.graphs import CAPTURED, LIMITS, TRITON, recorded, run

ENCODINGS: list[Fields] = [*WINDOWED, {"method": "default"}, {"method": "default"}, {"method": "alibi"}]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recorded(monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_are_those_of_a_fresh_look(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared, so that full pages are replaced by equal ones; windows give pages back."""
    tables: dict[tuple[int, int], tuple[int, ...]] = {}
    brief, ordinary = 0, DecodeRows.take

    def compared(self: DecodeRows, states: list[Any]) -> None:
        nonlocal brief
        ordinary(self, states)
        fresh = DecodeRows(self._cache, self._requests)
        ordinary(fresh, states)
        for group, pages in enumerate(self.pages):
            tables.update({(group, row): own for row, own in pages.items()})
            assert fresh.pages[group] == {row: tables[group, row] for row in range(len(states))}
        assert np.array_equal(self.numbers, fresh.numbers)
        brief += len(self.pages[0]) < len(states)

    monkeypatch.setattr(DecodeRows, "take", compared)
    with patched(tiny_model(family)[1]) as patch:
        methods = [parse(fields) for fields in ENCODINGS]
        prompts = prompts_for(methods, 30)
        prompts[4] = prompts[3]
        new = [24 + 3 * n for n in range(len(methods))]
        limits = replace(LIMITS, prefix_sharing=True)
        captured = run(patch, CAPTURED, methods, prompts, new, limits)
        assert captured.equals(run(patch, TRITON, methods, prompts, new, limits))
    assert brief > 20


def test_expected_numbers_are_those_of_the_step() -> None:
    """Past the edges of pages and of parts, and for a step that was not expected."""
    expecting, plain = (DecodeSteps(4, [40], 4, 99, torch.device("cpu")) for _ in range(2))
    tables = [tuple(range(1, 14)), tuple(range(20, 33)), tuple(range(40, 53))]
    for number in range(30):
        slots = [3, 1, 2] if number < 20 else [3, 1, 5]
        pages = [own[: (start + number) // 4 + 1] for own, start in zip(tables, (2, 7, 12), strict=True)]
        sequences = [
            PagedSequence(slot, start + number, 1, own)
            for slot, start, own in zip(slots, (2, 7, 12), pages, strict=True)
        ]
        found, wanted = (filled(steps, sequences, [number, 5, 6]) for steps in (expecting, plain))
        assert torch.equal(found._on_device, wanted._on_device)
        assert torch.equal(found.tables[0].block_table, wanted.tables[0].block_table)
        assert found.longest == wanted.longest
        found.expect()


@pytest.mark.parametrize("use", [TRITON, CAPTURED])
def test_positions_of_a_request_that_left_may_lie_past_a_table(
    use: EngineChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any slot is its own. A card would lose its context, and a server's thread would end."""
    left, ordinary = list[str](), SlottedInputs.prepare_batch_tensors

    def leaving(self: SlottedInputs, requests_in_batch: list[Any], **given: Any) -> None:
        last = requests_in_batch[-1].state
        leaves = len(requests_in_batch) == 2 and last.position_offset >= 70
        gone = self.requests.pop(last.request_id) if leaves else None
        ordinary(self, requests_in_batch, **given)
        if gone is not None:
            self.requests[last.request_id] = gone
            left.append(last.request_id)

    methods = [parse({"method": "default"}), parse({"method": "learned_interpolation", "factor": 2})]
    with patched(tiny_model("gpt2")[1]) as patch:
        assert patch.model.config.max_position_embeddings < 70
        expected = run(patch, use, methods, [[5, 9, 7], [8] * 70], [12, 8])
        monkeypatch.setattr(SlottedInputs, "prepare_batch_tensors", leaving)
        found = run(patch, use, methods, [[5, 9, 7], [8] * 70], [12, 8])
    assert left
    assert found.tokens[0] == expected.tokens[0]
    assert torch.allclose(found.logprobs[0], expected.logprobs[0], atol=1e-4)


def test_a_request_that_leaves_before_its_step_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has no graph yet, and the slots that it was planned with."""
    gone, left, ordinary = dict[str, EngineRequest](), list[str](), DecodeRows.take

    def leaving(self: DecodeRows, states: list[RequestState]) -> None:
        self._requests.update(gone)
        gone.clear()
        ordinary(self, states)
        if len(states) == 2 and not left:
            left.append(states[-1].request_id)
            gone[left[0]] = self._requests.pop(left[0])

    methods, prompts = [parse(ENCODINGS[0]), parse({"method": "alibi"})], [[5, 9, 7] * 8, [8, 3, 4]]
    with patched(tiny_model("llama")[1]) as patch:
        expected = run(patch, TRITON, methods, prompts, [12, 12])
        monkeypatch.setattr(DecodeRows, "take", leaving)
        found = run(patch, CAPTURED, methods, prompts, [12, 12])
    assert left
    assert found.tokens[0] == expected.tokens[0]
    assert torch.allclose(found.logprobs[0], expected.logprobs[0], atol=1e-4)
    assert found.count("captured") > 0
    assert found.count("failed") == 0


def test_each_step_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without a graph, before its capture."""
    written, ordinary = list[int](), DecodeStep.fill

    def counted(self: DecodeStep, rows: np.ndarray, *given: Any) -> None:
        written.append(len(rows))
        ordinary(self, rows, *given)

    monkeypatch.setattr(DecodeStep, "fill", counted)
    with patched(tiny_model("llama")[1]) as patch:
        found = run(patch, CAPTURED, [parse({"method": "default"})] * 2, [[5, 9, 7], [8, 3]], [9, 20])
    assert found.count("captured") > 1
    assert len(written) == found.count("captured") + found.count("replayed")


async def test_tokens_of_a_replayed_step_are_handed_out_during_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last ones when no step follows."""
    events: list[str] = []
    ordinary = StepProcessor.hand_out

    def noted(self: StepProcessor) -> None:
        if self.held:
            events.append(f"{len(self.held)} after {self.launches}")  # type: ignore[attr-defined]
        ordinary(self)

    monkeypatch.setattr(StepProcessor, "hand_out", noted)
    monkeypatch.setattr(StepProcessor, "launches", property(lambda self: replays(self)), raising=False)

    def replays(processor: StepProcessor) -> int:
        return sum(graph.replays for graph in processor.model_runner.graphs._graphs.values())  # type: ignore[union-attr,attr-defined]

    with patched(tiny_model("llama")[1]) as patch:
        engine = Engine(patch, LIMITS, (), None, CAPTURED)
        try:
            resolved = patch.resolve(parse({"method": "default"}), 7)
            lengths = [
                len(generation.token_ids)
                async for generation in engine.generate([5, 9], resolved, SamplingParams(), 5, pe_method="")
            ]
        finally:
            engine.thread.stop(1.0)
    assert lengths == [1, 2, 3, 4, 5]
    assert events == ["1 after 3"] * 3, "the next step is launched first"


async def test_an_error_comes_behind_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step runs out of memory while tokens of the one before are held."""
    with patched(tiny_model("llama")[1]) as patch:
        engine = Engine(patch, LIMITS, (), None, CAPTURED)
        lengths, failed = list[int](), list[int]()
        try:
            resolved = patch.resolve(parse({"method": "default"}), 72)
            with suppress(OutOfMemory):
                async for generation in engine.generate([5, 9], resolved, SamplingParams(), 70, pe_method=""):
                    lengths.append(len(generation.token_ids))
                    if len(lengths) == 1:
                        fail_from(engine, 6, failed, monkeypatch)
            monkeypatch.undo()
            recorded(monkeypatch)
            again = [
                generation.token_ids[-1]
                async for generation in engine.generate([5, 9], resolved, SamplingParams(), 4, pe_method="")
            ]
        finally:
            engine.thread.stop(1.0)
    assert lengths == [*range(1, failed[0] + 1)]
    assert (len(again), engine.thread.restarts) == (4, 0)


def fail_from(engine: Engine, generated: int, failed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose request has so many tokens or more have no memory for sampling. Their tokens go to ``failed``."""
    runner: Any = engine.thread.manager.batch_processor.model_runner  # type: ignore[union-attr]
    ordinary = runner._draw

    def failing(scores: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        states = [future.state for future in runner.inputs_and_outputs.requests_in_batch]
        known = max((state.generated_len() + ahead for state in states), default=0)
        if known >= generated:
            failed.append(known)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ordinary(scores, ahead)  # type: ignore[no-any-return]

    monkeypatch.setattr(runner, "_draw", failing)
