"""Captured decode steps without a card: recorded and replayed, in plain torch over the tensors of the kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from patches import PagedBatch, parse, patched
from patches.attention.paged.decode import DecodeStep
from service.engine.adapter.cards import graphs
from service.engine.choice import EngineChoice
from service.engine.engine import Engine
from service.engine.metrics import EngineMetrics
from service.engine.request import SamplingParams
from service.engine.verification import verify
from service.metrics import Metrics
from tests.methods import Fields
from tests.models import by_tier, tiny_model
from tests.patches.attention.paged import by_tables
from tests.recording import Recorded, Recorder
from tests.service.engine.adapter.test_paged_attention import WINDOWED, every_encoding, prompts_for
from tests.service.engine.cards.graphs import CAPTURED, LIMITS, TRITON, recorded, run

FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "bloom", "gemma2", "diffllama")


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recorded(monkeypatch)


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


def test_pages_out_of_reach_leave_gaps() -> None:
    methods = [parse(fields) for fields in WINDOWED]
    with patched(tiny_model("llama")[1]) as patch:
        prompts = [prompt[:4] * 10 for prompt in prompts_for(methods, 30, seed=3)]
        captured = run(patch, CAPTURED, methods, prompts, [20] * 3)
        assert captured.equals(run(patch, TRITON, methods, prompts, [20] * 3))
    assert captured.count("replayed") > captured.count("captured")


@pytest.mark.parametrize("family", by_tier(["llama", "mistral"]))
def test_requests_join_a_batch_and_leave_it(family: str, recorder: Recorder) -> None:
    """One row to eight, with rows of padding; mistral's layers slide."""
    sizes = {"sliding_window": 10} if family == "mistral" else {}
    with patched(tiny_model(family, **sizes)[1]) as patch:
        methods = [parse({"method": "default"}), parse({"method": "yarn", "factor": 4.0})] * 4
        prompts = prompts_for(methods, 40, seed=4)
        new, limits = [30, 2, 9, 17, 3, 25, 6, 12], replace(LIMITS, max_requests_per_batch=6, max_batch_tokens=16)
        captured = run(patch, CAPTURED, methods, prompts, new, limits)
        assert captured.equals(run(patch, TRITON, methods, prompts, new, limits))
        few = run(patch, CAPTURED, methods, prompts, new, limits)
    assert captured.count("replayed") > captured.count("captured") > 3
    assert few.tokens == captured.tokens


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({"method": "string", "shifted_offset": 12, "small_local_value": 4}, "turned"),
        ({"method": "self_extend", "group_size": 4, "neighbor_window": 8}, "turned keys"),
        ({"method": "sandwich"}, "biased"),
        ({"method": "default", "attention_temperature": "log_n"}, "plain"),
    ],
)
def test_the_kernel_has_a_graph_for_each_variant(fields: dict[str, object], variant: str) -> None:
    methods, new = [parse({"method": "default"}), parse(fields)], [4, 14]
    with patched(tiny_model("llama")[1]) as patch:
        prompts = [prompt[:5] for prompt in prompts_for(methods, 30, seed=5)]
        captured = run(patch, CAPTURED, methods, prompts, new)
        assert captured.equals(run(patch, TRITON, methods, prompts, new))
    assert captured.steps["replayed", variant] > 3


async def one_after_another(
    choice: EngineChoice, encodings: list[Fields], metrics: EngineMetrics | None = None, family: str = "llama"
) -> list[list[int]]:
    """Tokens of one prompt in an engine that stays."""

    async def tokens(engine: Engine, fields: Fields) -> list[int]:
        resolved = engine.patch.resolve(parse(fields), 12)
        async for generation in engine.generate([5, 9, 7, 3], resolved, SamplingParams(), 8, pe_method=""):
            last = list(generation.token_ids)
        return last

    with patched(tiny_model(family)[1]) as patch:
        engine = Engine(patch, LIMITS, (), metrics, choice)
        try:
            return [await tokens(engine, fields) for fields in encodings]
        finally:
            engine.thread.stop(1.0)


async def test_a_slot_with_another_encoding_needs_no_other_graph(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patches.batch.slots.MAX_SLOTS", 2)  # one beside the model's own
    encodings: list[Fields] = [
        {"method": "linear", "factor": 2.0},
        {"method": "linear", "factor": 8.0},
        {"method": "ntk", "factor": 4.0},
    ]
    found = [await one_after_another(choice, encodings) for choice in (CAPTURED, TRITON)]
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) == 3, "the encodings differ"
    assert len(recorder.graphs) == 2, "one for each number of parts"
    assert sum(graph.replays for graph in recorder.graphs) == 3 * 7 - 2


async def test_encodings_that_move_positions_have_other_graphs() -> None:
    """The rotary seam of a graph that was captured before them does not move any."""
    encodings: list[Fields] = [
        {"method": "default"},
        {"method": "dual_chunk", "chunk_size": 5, "formulation": "paper"},
        {"method": "self_extend", "group_size": 4, "neighbor_window": 2},
        {"method": "default"},
    ]
    found = [await one_after_another(choice, encodings) for choice in (CAPTURED, TRITON)]
    assert found[0] == found[1]
    assert found[0][0] == found[0][3]


async def test_metrics_show_what_each_step_had() -> None:
    metrics = Metrics()
    encodings: list[Fields] = [{"method": "default"}, {"method": "sandwich"}]
    await one_after_another(CAPTURED, encodings, EngineMetrics(metrics, "m"))
    lines = generate_latest(metrics.registry).decode().splitlines()
    steps = {line for line in lines if line.startswith("ropeway_engine_steps_total")}
    assert steps == {
        f'ropeway_engine_steps_total{{graph="{graph}",model_name="m",variant="{variant}"}} {count}.0'
        for variant in ("plain", "biased")
        for graph, count in (("none", 1), ("captured", 2), ("replayed", 5))
    }
    (info,) = (line for line in lines if line.startswith("ropeway_engine_info"))
    assert 'attention="triton",cuda_graphs="true",engine="paged"' in info


@pytest.mark.parametrize("family", by_tier(["gpt2", "biogpt", "opt", "gpt_neo"]))
async def test_encodings_that_move_added_positions_have_other_graphs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has the operations of those in its slots; another encoding in a slot has another graph."""
    monkeypatch.setattr("patches.batch.slots.MAX_SLOTS", 2)  # one beside the model's own
    metrics = Metrics()
    encodings: list[Fields] = [
        {"method": "default"},
        *({"method": "learned_interpolation", "factor": factor} for factor in (2.0, 8.0)),
        {"method": "alibi"},
        {"method": "default"},
    ]
    engines = (CAPTURED, EngineMetrics(metrics, "m")), (TRITON, None)
    found = [await one_after_another(choice, encodings, counted, family) for choice, counted in engines]
    assert found[0] == found[1]
    assert b'graph="failed"' not in generate_latest(metrics.registry)


def test_a_batch_has_plain_and_moved_positions_in_one_graph() -> None:
    moved = ({"method": "learned_interpolation", "factor": factor} for factor in (2.0, 3.0))
    methods = [parse(fields) for fields in ({"method": "default"}, *moved, {"method": "none"})]
    with patched(tiny_model("gpt2")[1]) as patch:
        prompts = prompts_for(methods, 20, seed=6)
        captured = run(patch, CAPTURED, methods, prompts, [6] * 4)
        assert captured.equals(run(patch, TRITON, methods, prompts, [6] * 4))
    assert captured.failures == []
    assert captured.count("replayed") > 2


# Memory


class Full(Recorder):
    """Out of memory at the first capture."""

    def __call__(self, forward: Callable[[], None]) -> Recorded:
        if not self.graphs:
            self.graphs.append(Recorded())
            try:
                forward()
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        return super().__call__(forward)


@pytest.mark.parametrize(("wait", "failed"), [(3, 1 + 3), (1000, 5)])
def test_a_capture_that_runs_out_of_memory_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, wait: int, failed: int
) -> None:
    """A step of scoring beside it may have had the memory. Two requests have five steps together."""
    logged: list[str] = []
    recorded(monkeypatch, Full())
    monkeypatch.setattr(graphs, "STEPS_WITHOUT_MEMORY", wait)
    monkeypatch.setattr(graphs, "log", SimpleNamespace(warning=lambda event, **_: logged.append(event)))
    methods, new = [parse({"method": "default"})] * 2, [6, 20]
    with patched(tiny_model("llama")[1]) as patch:
        prompts = [[5, 9, 7], [8, 3]]
        captured = run(patch, CAPTURED, methods, prompts, new)
        assert captured.equals(run(patch, TRITON, methods, prompts, new))
    assert logged == ["graph_failed"]
    assert len(captured.failures) == 1
    assert "OutOfMemoryError" in captured.failures[0]
    assert captured.count("failed") == failed
    assert captured.count("replayed") > 1, "other sizes have theirs"


def test_a_step_without_room_for_padding_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    methods, prompts = [parse({"method": "default"})] * 3, [[5, 9, 7], [8, 3], [4]]
    with patched(tiny_model("llama")[1]) as patch:
        ordinary = run(patch, TRITON, methods, prompts, [6] * 3)
        monkeypatch.setattr(graphs.DecodeGraphs, "_forward", forward)
        captured = run(patch, CAPTURED, methods, prompts, [6] * 3)
    assert captured.equals(ordinary)
    assert captured.count("failed") > 3
    assert captured.count("replayed") == captured.count("captured") == 0


def test_a_forward_that_fails_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(graphs.DecodeGraphs, "_forward", forward)
    with patched(tiny_model("llama")[1]) as patch, pytest.raises(ValueError, match="a fault"):
        run(patch, CAPTURED, [parse({"method": "default"})], [[5, 9]], [4])


def test_the_size_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    methods = [parse({"method": "default"})]
    with patched(tiny_model("llama")[1]) as patch:
        captured = run(patch, CAPTURED, methods, [[5, 9, 7]], [30])
        assert captured.equals(run(patch, TRITON, methods, [[5, 9, 7]], [30]))
    assert captured.count("captured") == 3, "one, two and four parts of 8 keys"


def test_the_check_at_start_refuses_graphs_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.verification.choices", lambda *_: (CAPTURED, TRITON))
    with patched(tiny_model("llama")[1]) as patch:
        assert verify(patch, "triton") == CAPTURED
        recorded(monkeypatch, Full())
        choice = verify(patch, "triton")
    assert (choice.attention, choice.graphs) == ("triton", False)
    assert "the paged engine (triton attention, CUDA graphs) cannot capture its decode steps" in str(choice.reason)


# Numbers that Python would bake in


def test_baked_places_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder finds a number that stays from the step of the capture: tokens differ."""
    methods, prompts = [parse({"method": "default"})], [[5, 9, 7]]
    first: dict[int, tuple[torch.Tensor, ...]] = {}

    def written(*arguments: Any) -> None:
        *states, places = arguments
        by_tables.write(*states, first.setdefault(id(places), tuple(each.clone() for each in places)))

    with patched(tiny_model("llama")[1]) as patch:
        ordinary = run(patch, TRITON, methods, prompts, [8])
        monkeypatch.setattr("patches.attention.paged.triton.launch.write", written)
        assert not run(patch, CAPTURED, methods, prompts, [8]).equals(ordinary)


def test_a_temperature_of_the_first_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards of one batch share what its layers compute once."""
    temperature = {"kind": "floor_log", "beta": 1.0, "length": 2}
    methods, prompts = [parse({"method": "default", "attention_temperature": temperature})], [[5, 9, 7] * 5]
    shared: dict[Hashable, object] = {}

    def with_former_parts(step: DecodeStep) -> PagedBatch:
        return PagedBatch([], packed=True, steps=step.tables, backend="triton", _shared=shared)

    with patched(tiny_model("llama")[1]) as patch:
        ordinary = run(patch, TRITON, methods, prompts, [8])
        assert run(patch, CAPTURED, methods, prompts, [8]).equals(ordinary, atol=1e-6)
        monkeypatch.setattr(graphs, "decode_batch", with_former_parts)
        assert not run(patch, CAPTURED, methods, prompts, [8]).equals(ordinary, atol=1e-6)
