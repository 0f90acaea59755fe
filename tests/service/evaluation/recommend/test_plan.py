"""Plans of recommendations: halving keeps the best, budgets hold, and requests that cannot be run are refused."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import GPT2Config, GPT2LMHeadModel

from patches import Patched
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.recommend.plan import plan_of
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.recommend.rounds import Schedule
from service.evaluation.recommend.unit import COPIES, RecallUnit
from service.evaluation.scoring.places import places_of
from service.evaluation.scoring.token_scores import TokenScores
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT, tiny_tokenizer
from tests.service.evaluation.prompting import finish, registry, settings_of
from tests.service.evaluation.recommend.made_up import BOTH, GOOD, LENGTH, answered, planned, ranges_of


@pytest.mark.parametrize(("bos", "prefix"), [("always", 1), ("never", 0)])
def test_parts_of_a_window_are_repeated_before_its_last_tokens(models: ModelRegistry, bos: str, prefix: int) -> None:
    unit = planned(models, bos=bos).units[-1]
    assert isinstance(unit, RecallUnit)
    assert len(unit.prefix) == prefix
    ids, segment = unit.token_ids, unit.layout.segment
    assert len(ids) == unit.tokens == LENGTH
    begin = len(ids) - unit.layout.tail - COPIES * segment
    assert ids[-unit.layout.tail :] == list(unit.document.token_ids[unit.stop - unit.layout.tail : unit.stop])
    firsts = [prefix + start for start in unit.starts]
    assert firsts[0] == prefix
    assert firsts[-1] < begin - segment
    for copy, first in enumerate(firsts):
        assert ids[first : first + segment] == ids[begin + copy * segment :][:segment]
    outcome = finish(unit.run())
    patch = unit.subject.patch
    with torch.no_grad(), unit.slot() as slot:
        positions = torch.arange(len(ids)) + (slot << 24)
        logits = patch.model(input_ids=torch.tensor([ids]), position_ids=positions[None]).logits[0]
    logprobs = logits.log_softmax(-1)[:-1]
    targets = torch.tensor(ids[1:])
    own = logprobs[torch.arange(len(targets)), targets]
    ranks = (logprobs > own[:, None]).sum(-1) + 1
    np.testing.assert_allclose(outcome["nll"], -own[-unit.layout.tail :], rtol=1e-4)
    late = [*own[LENGTH // 2 - 1 : begin - 1], *own[-unit.layout.tail :]]
    np.testing.assert_allclose(outcome["nll_late"], -np.mean(late, keepdims=True), rtol=1e-4)
    assert len(late) == LENGTH // 2 - COPIES * segment
    again = [ranks[begin + copy * segment :][: segment - 1].tolist() for copy in range(COPIES)]
    assert outcome["ranks"].tolist() == again
    assert outcome["ranks_first"].tolist() == [ranks[first:][: segment - 1].tolist() for first in firsts]


def test_an_encoding_that_fails_at_the_end_of_the_length_loses(
    models: ModelRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens repeated others and were not scored, so one that fails there won."""

    def scored(
        patch: Patched, token_ids: list[int], slot: int, *_: Any, **__: Any
    ) -> Generator[int, None, TokenScores]:
        scores = TokenScores.empty(len(token_ids) - 1, 0)
        scores.logprobs += np.random.default_rng(len(token_ids)).normal(-2, 0.01, len(scores.logprobs))
        if patch.slots[slot] == fails:
            scores.logprobs += 0.5
            scores.logprobs[-(LENGTH // 20) :] -= 4
        yield len(token_ids)
        return scores

    plan = planned(models, methods=BOTH)
    _, fails = (subject.patch.resolve(subject.method, LENGTH) for subject in plan.subjects[:2])
    monkeypatch.setattr("service.evaluation.recommend.unit.token_scores", scored)
    result = finish(evaluate(plan))
    assert (result.answer.label, result.methods[1].verdict) == ("default", "worse")


@pytest.mark.parametrize(("length", "late"), [(80, 0), (100, 4), (128, 32), (256, 96)])
def test_late_tokens_are_past_the_trained_length_in_the_last_half(
    models: ModelRegistry, length: int, late: int
) -> None:
    """Of 100 tokens, 16 are the tail and 16 repeat others. Four of the rest are past the trained 64."""
    unit = planned(models, length=length, bos="never").units[-1]
    assert isinstance(unit, RecallUnit)
    assert (unit.length, unit.layout.tail, unit.layout.repeated) == (length, 16, 16)
    assert unit.late == late


def test_the_target_and_lengths_before_it(models: ModelRegistry) -> None:
    """By default it is as long as the shortest document, and twice the trained length comes before it."""
    schedule = planned(models, lengths=[100, 128], length=256).schedule
    assert (schedule.shorter, schedule.target) == ((100, 128), 256)
    documents = [[7] * 1000, [8] * 150]
    for bos, prefix in (("never", 0), ("always", 1)):
        schedule = planned(models, input=documents, length=None, bos=bos).schedule
        assert (schedule.shorter, schedule.target) == ((128,), 150 + prefix)


def test_the_rounds_read_less_than_a_quarter_of_everything() -> None:
    for times in (2, 4, 8, 16):
        target, shorter = 256 * times, tuple(256 << step for step in range(1, times.bit_length() - 1))
        schedule = Schedule(24, 32, target, 256, shorter)
        assert (schedule.entrants, schedule.read) == ([24, 7, 3], [2, 8, 32])
        assert schedule.cost_from(0).tokens <= 24 * 32 * target / 4


@pytest.mark.parametrize(
    ("candidates", "windows", "entrants", "read"),
    [
        *((24, windows, [24, 7], [1, windows]) for windows in (2, 3, 4)),
        (24, 5, [24, 7, 3], [1, 2, 5]),
        (60, 16, [60, 16, 5], [1, 4, 16]),
        (12, 2, [12, 4], [1, 2]),
        (3, 4, [3], [4]),
        (1, 2, [1], [2]),
    ],
)
def test_every_round_reads_more_windows(candidates: int, windows: int, entrants: list[int], read: list[int]) -> None:
    """24 candidates became 7 and then 3 on the same single window."""
    schedule = Schedule(candidates, windows, 1024, 256, (512,))
    assert (schedule.entrants, schedule.read) == (entrants, read)


def test_few_windows_drop_candidates_on_a_single_one_and_say_so(models: ModelRegistry) -> None:
    first = planned(models, windows=4)
    result, last = answered(first, {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert last.cost.tokens == sum(unit.tokens for unit in last.units) == result.tokens_read <= first.cost.tokens
    reached = {(method.rounds, at.windows) for method, at in result.ranked()}
    assert reached == {(1, 1), (2, 4)}
    dropped = sum(method.verdict == "dropped" for method, _ in result.ranked())
    assert dropped == first.schedule.candidates - first.schedule.entrants[1]
    says = f"{dropped} candidates were dropped after one window: more windows compare candidates better."
    assert says in result.words()
    more = planned(models, windows=32, input=TEXT * 2)
    whole, _ = answered(more, {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert "dropped after one window" not in " ".join(whole.words())


def test_the_cost_is_the_most_and_in_the_end_exact(models: ModelRegistry) -> None:
    first = planned(models)
    bound = first.cost
    _, last = answered(first, {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert last.cost.tokens == sum(unit.tokens for unit in last.units) <= bound.tokens
    assert last.cost.units == last.cost.passes == len(last.units)
    assert len(first.units) < len(last.units) < first.schedule.candidates * 16


@pytest.mark.parametrize("fields", [{"methods": BOTH, "lengths": [100, 128]}, {"methods": [{"method": "default"}]}])
def test_the_most_is_exact_where_no_candidate_leaves(models: ModelRegistry, fields: dict[str, Any]) -> None:
    first = planned(models, **fields)
    _, last = answered(first, {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert first.cost == last.cost
    assert last.cost == (sum(unit.tokens for unit in last.units), len(last.units), len(last.units))


def test_every_window_shows_whether_the_model_copies(models: ModelRegistry) -> None:
    """With a quarter of them, the demo model seemed to copy nothing, and an encoding that forgets was chosen."""
    plan = planned(models)
    own = [unit for unit in plan.units if unit.length == plan.schedule.reference]
    assert len(own) == plan.schedule.windows == 16
    assert {unit.subject.label for unit in own} == {"default"}
    assert {unit.late for unit in own if isinstance(unit, RecallUnit)} == {0}, "all positions are trained"
    gains = {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}
    assert answered(planned(models), gains, (2.0, 0.15))[0].answer.recall_counts


def test_within_the_trained_length_nothing_else_is_tried(models: ModelRegistry) -> None:
    result = finish(evaluate(planned(models, length=64, windows=4)))
    assert [method.label for method in result.methods] == ["default"]
    assert result.answer.words[0] == "For 64 tokens keep the model's own encoding: it was trained with 64."
    assert ranges_of(result) == [{"up_to": 64, "pe": {"method": "default"}}]


def test_named_candidates_stay_as_they_are(models: ModelRegistry) -> None:
    methods = [{"method": "yarn", "factor": 4.0}, {"method": "linear", "factor": 4.0}]
    made_up = {"others": (3.0, 0.1), "yarn(factor=4)": (2.0, 0.8)}
    result, plan = answered(planned(models, methods=methods), made_up, (2.0, 0.9))
    assert [method.label for method in result.methods] == ["default", "yarn(factor=4)", "linear(factor=4)"]
    assert [found.up_to for found in result.answer.ranges] == [64, 256]
    assert len(plan.stages) == 2, "three candidates are one round"


def test_lengths_before_the_target_read_a_quarter_of_the_windows(models: ModelRegistry) -> None:
    assert [Schedule(24, windows, 1024, 256, (512,)).at_shorter for windows in (2, 3, 4, 16, 32, 64)] == [
        *(2, 3, 4, 4, 8, 16)
    ]


def test_finished_rounds_are_the_result_of_a_request_for_these_rounds(models: ModelRegistry) -> None:
    request = RecommendRequest.model_validate({"input": TEXT, "length": LENGTH, "windows": 16})
    _, last = answered(planned(models), {"others": (3.0, 0.1)}, (2.0, 0.9))
    sizes = [sum(reading.stop - reading.begin for reading in stage) for stage in last.stages]
    assert last.reduced(request, set(range(sizes[0] - 1))) is None
    assert last.reduced(request, set(range(sizes[0]))).rounds == 1
    assert last.reduced(request, set(range(sum(sizes[:2]) + 1))).rounds == 2
    result, part = answered(planned(models, rounds=2), {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert [unit.inputs() for unit in part.units[: sizes[0]]] == [unit.inputs() for unit in last.units[: sizes[0]]]
    assert (result.answer.label, len(part.stages)) == (GOOD, 2)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"length": 63}, "length", "at least 64"),
        ({"budget": 5000}, "budget", r"must be at least \d+ tokens for \d+ candidates"),
        ({"length": 1 << 20}, "length", "^length: 1048576 is beyond"),
        ({"length": 256, "lengths": [128, 256], "input": "A short text."}, "length", "beyond the shortest document"),
        ({"length": None, "lengths": [128, 256], "input": "A short text."}, "lengths", "beyond the shortest document"),
        ({"methods": [{"method": "t5_bias"}]}, "methods.0", "relative_attention_bias"),
    ],
)
def test_what_cannot_be_run_is_refused(models: ModelRegistry, fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidEvaluation, match=message) as refused:
        planned(models, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("auto", ["auto", {"method": "auto"}])
def test_auto_is_no_candidate(auto: Any) -> None:
    """Its policy could not be written, after everything was measured."""
    with pytest.raises(ValidationError, match="auto chooses among encodings and cannot be a candidate"):
        RecommendRequest(methods=["yarn:4", auto])


def test_windows_have_places_of_their_own(models: ModelRegistry) -> None:
    document = planned(models).documents[0].cut(100)
    found = places_of([document, document], 60, 20, 5, seed=0)
    places = found.windows
    assert found.every == 6
    assert sorted(places) == sorted(set(places))
    assert {place.stop for place in places} <= {60, 80, 100}
    assert len(places) == 5
    assert places_of([document, document], 60, 20, 5, seed=1).windows != places
    with pytest.raises(InvalidEvaluation, match="needs 120 tokens for two windows"):
        places_of([document], 90, 30, 5, seed=0)


def test_a_budget_bounds_the_tokens(models: ModelRegistry) -> None:
    whole = planned(models).cost.tokens
    smaller = planned(models, budget=whole // 2)
    assert smaller.cost.tokens <= whole // 2
    assert smaller.schedule.windows < 16
    result = finish(evaluate(smaller))
    assert result.tokens_read <= whole // 2
    assert result.windows == smaller.schedule.windows
    says = f"The budget allows {result.windows} of 16 windows: a larger one compares encodings better."
    assert says in result.words()
    assert "windows: " not in " ".join(planned(models).cautions)
    least = planned(models, windows=2).cost.tokens
    assert planned(models, budget=least).schedule.windows == 2
    with pytest.raises(InvalidEvaluation, match=f"budget: must be at least {least} tokens"):
        planned(models, budget=least - 1)


def test_a_text_with_little_room_says_so(models: ModelRegistry) -> None:
    few = planned(models, windows=1024)
    assert f"The text has room for {few.schedule.windows} of 1024 windows" in few.cautions[0]


def test_the_route_answers_and_streams(client: httpx.Client) -> None:
    methods = [{"method": "yarn", "factor": 2.0}]
    body = {"model": "tiny", "input": TEXT, "length": 128, "windows": 4, "methods": methods}
    answer = client.post("/recommend", json=body)
    assert answer.status_code == 200, answer.text
    result = answer.json()
    assert result["answer"]["label"] in ("default", "yarn(factor=2)")
    assert client.get(result["links"]["png"]).content.startswith(b"\x89PNG")
    assert client.get(result["links"]["csv"]).text.startswith("method,model,length,windows,perplexity")
    streamed = client.post("/recommend", json=body | {"stream": True}).text
    assert "event: progress" in streamed
    assert streamed.count("event: result") == 1


def test_a_table_that_ends_is_the_reference_alone(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, **sizes)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    for models in registry(tmp_path):
        result = finish(
            evaluate(plan_of(RecommendRequest(input=TEXT, length=128, windows=4), models, settings_of(tmp_path)))
        )
        labels = {at.length for at in result.methods[0].lengths}
        assert (result.methods[0].label, labels) == ("default", {64})
        assert result.answer.label in {method.label for method, _ in result.ranked()} != {"default"}
        assert "The model's own encoding ends before that length." in result.words()
        methods = [{"method": "default"}]
        with pytest.raises(InvalidEvaluation, match="positions") as refused:
            plan_of(RecommendRequest(input=TEXT, length=128, methods=methods), models, settings_of(tmp_path))
        assert refused.value.param == "methods.0", "the shell times another one then"
        methods = [{"method": "none"}]
        assert plan_of(RecommendRequest(input=TEXT, length=128, methods=methods), models, settings_of(tmp_path))
