"""Steps that are launched before the tokens of the one before have arrived: used, or dropped without a trace."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from patches import Patched, parse, patched
from service.engine.adapter.cards.ahead import MOST_ROWS, Ahead
from service.engine.adapter.cards.decode_rows import DecodeRows
from service.engine.adapter.runner import RequestRunner
from service.engine.choice import EngineChoice
from service.engine.engine import Engine
from service.engine.generation import Generation
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest, SamplingParams
from tests.grammars import letters
from tests.methods import Fields
from tests.models import tiny_model
from tests.service.engine.adapter.test_paged_attention import WINDOWED, prompts_for
from tests.service.engine.cards.graphs import CAPTURED, LIMITS, TRITON, recorded, requests_of

ENCODINGS: list[Fields] = [
    {"method": "default"},
    {"method": "yarn", "factor": 4.0},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 8},
    {"method": "alibi"},
    *WINDOWED,
]
DRAWN = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.2, top_p=0.9, seed=4),
    SamplingParams(temperature=0.7, top_k=5, min_tokens=9, min_p=0.01, logit_bias=((9, 2.0),)),
)


@pytest.fixture(autouse=True)
def _recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch)


@pytest.fixture(name="ends")
def _ends(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    return early_steps(monkeypatch)


def early_steps(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts steps that were launched early: True if used."""
    ends, ordinary = Counter[bool](), Ahead.is_step_of

    def noted(self: Ahead, rows: DecodeRows) -> bool:
        used = ordinary(self, rows)
        ends[used] += 1
        return used

    monkeypatch.setattr(Ahead, "is_step_of", noted)
    return ends


def requests(patch: Patched, encodings: list[Fields], new: list[int], eos: tuple[int, ...] = ()) -> list[EngineRequest]:
    methods = [parse(fields) for fields in encodings]
    made = requests_of(patch, methods, prompts_for(methods, 30), new)
    for number, request in enumerate(made):
        request.sampling, request.eos_token_ids = DRAWN[number % len(DRAWN)], eos
    return made


def generated(
    patch: Patched, choice: EngineChoice, made: list[EngineRequest], limits: EngineLimits = LIMITS
) -> list[list[int]]:
    for request in made:
        request.noise_seed = 7
    engine = choice.built(patch, limits, lambda *_: None)
    tokens = engine.run_to_end(made)
    for request in made:
        patch.slots.release(request.slot)
    return tokens


def test_tokens_are_those_of_ordinary_steps(ends: Counter[bool]) -> None:
    """Past the edges of pages and of parts, with every kind of sampling, prefixes that are shared, and windows."""
    new, limits = [20 + 3 * number for number in range(len(ENCODINGS))], replace(LIMITS, page_size=8)
    with patched(tiny_model("llama")[1]) as patch:
        found = [generated(patch, each, requests(patch, ENCODINGS, new), limits) for each in (CAPTURED, TRITON)]
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == new
    assert ends[True] > 5
    assert ends[True] > ends[False], "a window gives a page back, which nobody foresees"


NEEDING = {
    "penalties": lambda: SamplingParams(frequency_penalty=0.8, presence_penalty=0.3),
    "grammar": lambda: SamplingParams(grammar=letters("(ab|[a-f]g){9,}")),
}


@pytest.mark.parametrize("what", NEEDING)
def test_what_needs_the_tokens_before_waits_for_them(ends: Counter[bool], what: str) -> None:
    with patched(tiny_model("llama")[1]) as patch:
        found = []
        for choice in (CAPTURED, TRITON):
            made = requests(patch, ENCODINGS[:2], [30, 30])
            made[0].sampling = NEEDING[what]()
            found.append(generated(patch, choice, made))
    assert found[0] == found[1]
    assert sum(ends.values()) == 0


def test_equal_prompts_share_their_pages(ends: Counter[bool]) -> None:
    """Equal pages of two requests become one while steps start early."""
    with patched(tiny_model("llama")[1]) as patch:
        made = [requests(patch, [{"method": "default"}] * 3, [30] * 3) for _ in range(2)]
        for request in (request for each in made for request in each):
            request.prompt_ids, request.sampling, request.cache_key = [5, 9, 7, 3] * 3, SamplingParams(), "shared"
        found = [generated(patch, *each) for each in zip((CAPTURED, TRITON), made, strict=True)]
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] == found[0][2]
    assert ends[True] > 10


async def test_other_work_comes_behind_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write tables that the step reads."""
    events: list[str] = []
    go_ahead = RequestRunner.go_ahead

    def went_ahead(self: RequestRunner) -> None:
        go_ahead(self)
        if self.ahead is not None:
            events.append("ahead")

    def work() -> Any:
        for _ in range(10):
            events.append("work")
            yield None

    monkeypatch.setattr(RequestRunner, "go_ahead", went_ahead)
    monkeypatch.setattr(RequestRunner, "let_steps_end", lambda self: events.append("order"))
    with patched(tiny_model("llama")[1]) as patch:
        engine = Engine(patch, replace(LIMITS, page_size=32), (), None, CAPTURED)
        try:
            resolved = patch.resolve(parse({"method": "default"}), 90)
            steps = engine.generate([5, 9, 7], resolved, SamplingParams(), 60, pe_method="")
            await anext(steps)
            await engine.thread.interleave(work(), lambda _: None)
            await steps.aclose()
        finally:
            engine.thread.stop(1.0)
    assert {"ahead", "work"} < set(events)
    assert all(events[number - 1] == "order" for number, event in enumerate(events) if event == "work")


def test_one_request_waits_for_the_host_at_edges_only(ends: Counter[bool]) -> None:
    """A step that begins a page is not launched early: its page is not known."""
    with patched(tiny_model("llama")[1]) as patch:
        made = [requests(patch, [{"method": "default"}], [60]) for _ in range(2)]
        for (request,) in made:
            request.sampling = SamplingParams(temperature=1.0)
        found = [generated(patch, *each) for each in zip((CAPTURED, TRITON), made, strict=True)]
    assert found[0] == found[1]
    assert ends[False] == 0
    assert ends[True] > 35


def test_an_end_that_nobody_foresees_drops_the_step(ends: Counter[bool]) -> None:
    """One request ends by its token, and the others go on."""
    encodings: list[Fields] = [{"method": "default"}, {"method": "ntk", "factor": 4.0}, {"method": "default"}]
    limits = replace(LIMITS, page_size=32)
    with patched(tiny_model("llama")[1]) as patch:
        whole = generated(patch, TRITON, requests(patch, encodings, [40] * 3), limits)
        eos = next(token for token in whole[0][20:] if whole[0].index(token) >= 20)
        made = [requests(patch, encodings, [40] * 3, (eos,)) for _ in range(2)]
        cut = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in whole]
        for request in (request for each in made for request in each):
            request.sampling = replace(request.sampling, min_tokens=0)
            request.max_new_tokens = 40
        found = [ended(patch, choice, each, limits) for choice, each in zip((CAPTURED, TRITON), made, strict=True)]
    assert found[0] == found[1]
    assert found[0][0] == cut[0]
    assert 20 < len(cut[0]) < 40
    assert ends[False] >= 1
    assert ends[True] > 10


def ended(patch: Patched, choice: EngineChoice, made: list[EngineRequest], limits: EngineLimits) -> list[list[int]]:
    """As ``generated``, of requests that may end early."""
    found: dict[str, list[int]] = {}
    engine: Any = choice.built(patch, limits, lambda *_: None)
    ordinary = engine.output_router.deliver_batch

    def noted(outputs: list[Any]) -> None:
        found.update((output.request_id, list(output.generated_tokens)) for output in outputs)
        ordinary(outputs)

    engine.output_router.deliver_batch = noted
    for request in made:
        request.noise_seed = 7
    with pytest.raises(RuntimeError, match="not scheduled to its end"):
        engine.run_to_end(made)
    for request in made:
        patch.slots.release(request.slot)
    return [found[request.request_id] for request in made]


@pytest.mark.parametrize(
    ("count", "sampling"),
    [(1, SamplingParams(logprobs=1)), (MOST_ROWS + 1, SamplingParams())],
    ids=["logprobs", "many"],
)
def test_such_requests_never_go_ahead(count: int, sampling: SamplingParams, ends: Counter[bool]) -> None:
    with patched(tiny_model("llama")[1]) as patch:
        made = requests(patch, [{"method": "default"}] * count, [20] * count)
        for request in made:
            request.sampling = sampling
        generated(patch, CAPTURED, made)
    assert ends.total() == 0


async def test_requests_that_come_and_leave_change_nothing(ends: Counter[bool]) -> None:
    """One joins, another is cancelled, and the first has the tokens that it has alone."""
    with patched(tiny_model("llama")[1]) as patch:
        engine = Engine(patch, replace(LIMITS, page_size=32), (), None, CAPTURED)
        resolved = patch.resolve(parse({"method": "default"}), 90)

        async def last(prompt: list[int], count: int, leave_at: int | None = None) -> Generation:
            steps = engine.generate(prompt, resolved, SamplingParams(), count, pe_method="")
            async for generation in steps:
                if len(generation.token_ids) == leave_at:
                    break
            await steps.aclose()
            return generation

        try:
            alone = await last([5, 9, 7], 60)
            first = asyncio.create_task(last([5, 9, 7], 60))
            await asyncio.sleep(0.02)
            others = [await last([8, 3], 60, leave_at=4), await last([4], 9)]
            beside, again = await first, await last([5, 9, 7], 60)
            await last([8, 3], 60, leave_at=20)
            await asyncio.sleep(0.2)
            runner: Any = engine.thread.manager.batch_processor.model_runner  # type: ignore[union-attr]
            assert runner.ahead is None, "an idle thread has no step in flight"
        finally:
            engine.thread.stop(1.0)
    assert alone.token_ids == beside.token_ids == again.token_ids
    assert [len(each.token_ids) for each in others] == [4, 9]
    assert ends[True] > 60


def test_without_memory_for_it_the_step_comes_again(monkeypatch: pytest.MonkeyPatch, ends: Counter[bool]) -> None:
    ordinary = RequestRunner._draw

    def failing(self: RequestRunner, scores: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        if ahead:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ordinary(self, scores, ahead)

    with patched(tiny_model("llama")[1]) as patch:
        expected = generated(patch, TRITON, requests(patch, ENCODINGS[:3], [20] * 3))
        monkeypatch.setattr(RequestRunner, "_draw", failing)
        assert generated(patch, CAPTURED, requests(patch, ENCODINGS[:3], [20] * 3)) == expected
    assert ends.total() == 0
