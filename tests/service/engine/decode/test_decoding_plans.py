"""A plan of decoding serves several steps, and keys that turn stay in rings from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch

from patches import Method, Patched, parse, patched
from patches.attention.decode import reading, shared
from patches.attention.decode.plan import STEPS
from patches.attention.decode.shared import turns_once
from patches.attention.decode.sums import ragged
from patches.attention.decode.sums.ragged import RaggedBatch
from patches.attention.decode.sums.rings import Ring
from patches.model.attention import planning
from service.engine.choice import PAGED
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest
from tests.methods import Fields
from tests.models import VOCAB_SIZE, tiny_model
from tests.service.engine.adapter.test_paged_attention import LIMITS, prompts_for, requests_of

NEARBY: list[Fields] = [
    {"method": "self_extend", "group_size": 3, "neighbor_window": 13},
    {"method": "rerope", "window": 9, "attention_temperature": "log_n"},
    {"method": "leaky_rerope", "window": 11, "scaling_factor": 3.5},
    {"method": "dpe", "group_factors": [2, 5], "neighbor_window": 17},
]
"""Encodings with a window of keys that turn."""

METHODS: list[Fields] = [
    *NEARBY,
    {"method": "string", "shifted_offset": 15, "small_local_value": 4},
    {"method": "dual_chunk", "chunk_size": 12, "local_window": 2},
    {"method": "alibi"},
    {"method": "kerple_log", "r1": 1.0, "r2": 0.5},
    {"method": "lm_infinite", "n_global": 3, "n_local": 9},
    {"method": "yarn", "factor": 4.0},
    {"method": "default"},
]
NEW = 30
LENGTHS = 40, 10, 11, 12, 13, 33, 5, 27
"""Tokens of prompts."""
PAGES = replace(LIMITS, page_size=32)
"""Nothing is evicted within so few tokens."""
ROOM = replace(PAGES, max_batch_tokens=2048)


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> list[RaggedBatch]:
    """The batches by sums, of which even two short sequences make one."""
    made: list[RaggedBatch] = []
    make = ragged.ragged_batch

    def noted(*arguments: Any) -> RaggedBatch:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(shared, "LEAST_SCORES", 1)
    monkeypatch.setattr(shared, "ragged_batch", noted)
    return made


def generated(
    patch: Patched,
    methods: list[Method],
    news: Sequence[int],
    limits: EngineLimits = ROOM,
    *,
    plans: bool = True,
    fails: bool = False,
) -> list[list[float]]:
    """Log-probabilities of requests with ``news`` tokens each. Without ``plans``, each step is planned anew."""
    prompts = zip(prompts_for(methods, 40), cycle(LENGTHS), strict=False)
    requests = requests_of(patch, methods, [(prompt * length)[:length] for prompt, length in prompts])
    for request, new in zip(requests, news, strict=True):
        request.max_new_tokens = new
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not plans:
            monkeypatch.setattr(planning, "turns_once", lambda *_: False)
        manager = PAGED.built(patch, limits)
        if fails:
            with pytest.raises(RuntimeError, match="memory"):
                manager.run_to_end(requests)
        else:
            manager.run_to_end(requests)
    for request in requests:
        patch.slots.release(request.slot)
    return [_values(request) for request in requests]


def _values(request: EngineRequest) -> list[float]:
    return [step.logprob for step in request.logprobs]


def assert_alike(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(values) for values in found] == [len(values) for values in expected]
    for own, other in zip(found, expected, strict=True):
        assert torch.allclose(torch.tensor(own), torch.tensor(other), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox", "mistral"])
def test_plans_have_the_tokens_of_single_steps(family: str, sums: list[RaggedBatch]) -> None:
    """Rotation by half, interleaved or of a part of the head; and a layer's own window."""
    with patched(tiny_model(family)[1]) as patch:
        methods = [parse(fields) for fields in METHODS]
        found = generated(patch, methods, [NEW] * len(methods))
        served = [batch.step + 1 for batch in sums]
        sums.clear()
        expected = generated(patch, methods, [NEW] * len(methods), plans=False)
    assert max(served) == STEPS
    assert sum(served) >= NEW - 1
    assert len(served) < NEW // 2
    assert len(sums) >= NEW - 1
    assert_alike(found, expected)


def test_sums_begin_at_their_least_number_of_scores(monkeypatch: pytest.MonkeyPatch, sums: list[RaggedBatch]) -> None:
    """An ordinary plan before them does not go on behind it."""
    with patched(tiny_model("llama")[1]) as patch:
        least = 54 * patch.geometry.num_attention_heads
        monkeypatch.setattr(shared, "LEAST_ALONE", least)
        generated(patch, [parse("default")], [NEW])
    assert len(sums[0].entries) == least + (STEPS - 1) * patch.geometry.num_attention_heads


def test_readings_with_biases_are_not_kept() -> None:
    """Each would keep a number for each key of a text."""
    with patched(tiny_model("llama")[1]) as patch:
        tempered = [fields | {"attention_temperature": "log_n"} for fields in METHODS[6:8]]
        for methods, are_kept in ((METHODS[6:8], False), (tempered, False), (NEARBY, True)):
            for kept in (reading._kept_reading, reading._kept_readings):
                kept.cache_clear()
            generated(patch, [parse(fields) for fields in methods], [NEW] * len(methods))
            for kept in (reading._kept_reading, reading._kept_readings):
                assert (kept.cache_info().currsize > 0) == are_kept


def test_each_band_turns_a_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a prompt turn in the first step, and then one in each step."""
    added: list[int] = []
    add = Ring.add

    def noted(self: Ring, positions: range) -> None:
        added.append(len(self.missing(positions)))
        add(self, positions)

    monkeypatch.setattr(Ring, "add", noted)
    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse(fields) for fields in NEARBY]
        generated(patch, methods, [NEW] * len(methods))
    assert len(added) == len(methods) * (NEW - 1)
    assert sum(count > 1 for count in added) <= len(methods)


def test_requests_come_and_end_within_a_plan(sums: list[RaggedBatch]) -> None:
    """Prompts are read a few at a time, beside those that decode already."""
    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse(fields) for fields in METHODS * 2]
        news = [3 + 7 * number % 31 for number in range(len(methods))]
        found = generated(patch, methods, news, PAGES)
        served = {batch.step + 1 for batch in sums}
        expected = generated(patch, methods, news, PAGES, plans=False)
    assert len(served) > 2
    assert_alike(found, expected)


@pytest.mark.parametrize("sinks", [0, 5, 16])
def test_a_plan_goes_on_beside_evicted_keys(sinks: int, sums: list[RaggedBatch]) -> None:
    """Until the request's page is full, or until one is evicted: then its keys are elsewhere."""
    limits, new = replace(ROOM, page_size=16), 80
    window = {"method": "streaming", "sink_tokens": sinks, "window": 20, "absolute_positions": True}
    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse(fields) for fields in (window, *NEARBY)]
        found = generated(patch, methods, [new] * len(methods), limits)
        served = [batch.step + 1 for batch in sums]
        expected = generated(patch, methods, [new] * len(methods), limits, plans=False)
    assert sum(served) >= new - 1
    assert len(served) < new // 3
    assert_alike(found, expected)


def test_a_plan_goes_on_beside_a_shared_prefix(sums: list[RaggedBatch]) -> None:
    """The keys of a prefix are those of an earlier request, and the rest is elsewhere."""
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(3, VOCAB_SIZE, (64,), generator=generator).tolist()
    prompts = [[*prefix, 5, 6], list(range(3, 60)), [*prefix, 7, 8, 9], [*prefix, 10]]
    methods: list[Method] = [parse("default")] * len(prompts)
    with patched(tiny_model("llama")[1]) as patch:
        requests, alone = (requests_of(patch, methods, prompts) for _ in range(2))
        for request in (*requests, *alone):
            request.max_new_tokens = NEW
        PAGED.built(patch, PAGES).run_to_end(requests)
        served = [batch.step + 1 for batch in sums]
        for request in alone:
            PAGED.built(patch, PAGES).run_to_end([request])
    assert [request.cached_tokens for request in requests] == [0, 0, 64, 64]
    assert len(served) < NEW // 2
    assert_alike([_values(request) for request in requests], [_values(request) for request in alone])


@pytest.mark.parametrize("places", [0, 16, 100])
def test_keys_turn_in_every_step_without_places_for_a_ring(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.adapter.pages.by_head.spare_places", lambda *_: places)
    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse(fields) for fields in NEARBY]
        found = generated(patch, methods, [NEW] * len(methods))
        expected = generated(patch, methods, [NEW] * len(methods), plans=False)
    assert_alike(found, expected)


def test_keys_turn_again_after_steps_by_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request is long, the keys of others turn in every step, in the places that rings had."""
    monkeypatch.setattr(ragged, "FEW_HEADS", 0)
    used: list[bool] = []

    def noted(*arguments: Any) -> bool:
        used.append(turns_once(*arguments))
        return used[-1]

    with patched(tiny_model("llama")[1]) as patch:
        monkeypatch.setattr(ragged, "MOST_NUMBERS", 60 * patch.geometry.head_dim)
        methods = [parse(fields) for fields in ({"method": "default"}, *NEARBY)]
        news = [25, *[38] * 4]
        expected = generated(patch, methods, news, plans=False)
        monkeypatch.setattr(planning, "turns_once", noted)
        found = generated(patch, methods, news)
    changes = [after for before, after in pairwise(used) if before != after]
    assert changes == [False, True], "rings, other calls, and rings again"
    assert_alike(found, expected)


@pytest.mark.parametrize("step", [1, 4, 9])
def test_keys_turn_again_after_a_step_without_memory(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layer had turned them, and its second one not."""
    calls: list[int] = []
    attend = shared.ragged_attention

    def fails_once(*arguments: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 2 * step:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attend(*arguments)

    methods = [parse(fields) for fields in NEARBY]
    with patched(tiny_model("llama")[1]) as patch:
        expected = generated(patch, methods, [NEW] * len(methods), plans=False)
        monkeypatch.setattr(shared, "ragged_attention", fails_once)
        found = generated(patch, methods, [NEW] * len(methods), fails=True)
    assert len(calls) > 2 * step
    others = [(own, other) for own, other in zip(found, expected, strict=True) if len(own) == NEW]
    assert len(others) == len(methods) - 1
    assert_alike(*(list(each) for each in zip(*others, strict=True)))


def test_new_rings_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan reads the place of a key before it is there, and excludes its score. Earlier requests left anything."""
    empty = torch.empty

    def filled(*arguments: Any, **kind: Any) -> torch.Tensor:
        made = empty(*arguments, **kind)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse(fields) for fields in NEARBY]
        expected = generated(patch, methods, [NEW] * len(methods), plans=False)
        monkeypatch.setattr("service.engine.adapter.pages.by_head.torch.empty", filled)
        found = generated(patch, methods, [NEW] * len(methods))
    assert_alike(found, expected)
