"""Recommendations: halving keeps the best, recall counts, ties go to the model's own encoding, budgets hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import GPT2Config, GPT2LMHeadModel

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.recommend.plan import RecommendPlan, _places, plan_of
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.recommend.results import RecommendResult
from service.evaluation.recommend.rounds import Schedule
from service.evaluation.recommend.unit import COPIES, RecallUnit
from service.evaluation.unit import Outcome, Plan, evaluate
from service.export.targets import TARGETS
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT, tiny_tokenizer
from tests.service.evaluation.prompting import finish, registry, settings_of

LENGTH = 256
GOOD = "self_extend(group_size=5)"
WINDOWED = ("streaming", "lm_infinite")


def ranges_of(result: Any) -> list[dict[str, Any]]:
    return [{"up_to": found.up_to, "pe": found.pe} for found in result.answer.ranges]


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")


def planned(models: ModelRegistry, **fields: Any) -> RecommendPlan:
    body = {"input": TEXT, "length": LENGTH, "windows": 16} | fields
    return plan_of(RecommendRequest.model_validate(body), models, settings_of(Path("tiny")))


def made(unit: RecallUnit, nll: float, recall: float, noise: float = 0.0, wavers: float = 0.0) -> Outcome:
    """An outcome with this NLL and recall, and a difficulty of the window that all candidates share. ``noise`` of the
    NLL is by the window, and ``wavers`` of the recall."""
    by_window = np.sin(7 * unit.stop)
    harder = (unit.stop * 37 % 101) / 101 + noise * by_window
    recall = min(1.0, max(0.0, recall + wavers * by_window))
    ranks = np.full((COPIES, unit.layout.segment - 1), 2)
    ranks.reshape(-1)[: round(recall * ranks.size)] = 1
    first = np.full_like(ranks, 2)
    return {"nll": np.full(unit.layout.tail, nll + harder), "ranks": ranks, "ranks_first": first}


def answered(plan: Plan, made_up: Mapping[str, tuple[float, ...]], own_within: tuple[float, ...]) -> Any:
    """The result, and the last plan, of candidates with these (NLL, recall); all others have those of ``others``."""

    def outcome(unit: RecallUnit) -> Outcome:
        label = unit.subject.label
        within = label == "default" and unit.length <= 64
        return made(unit, *(own_within if within else made_up.get(label, made_up["others"])))

    outcomes: list[Outcome] = []
    extended: Plan | None = plan
    while extended is not None:
        plan = extended
        outcomes += [outcome(unit) for unit in plan.units[len(outcomes) :]]  # type: ignore[arg-type]
        extended = plan.extended(outcomes)
    result = plan.result(outcomes)
    assert isinstance(result, RecommendResult)
    return result, plan


def test_a_window_ends_with_parts_of_itself(models: ModelRegistry) -> None:
    unit = planned(models).units[-1]
    assert isinstance(unit, RecallUnit)
    ids, segment = unit.token_ids, unit.layout.segment
    assert len(ids) == unit.tokens == LENGTH
    begin = len(ids) - COPIES * segment
    for copy, start in enumerate(unit.starts):
        first = start + (0 if unit.bos is None else 1)
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
    np.testing.assert_allclose(outcome["nll"], -own[begin - 1 - unit.layout.tail : begin - 1], rtol=1e-4)
    again = [ranks[begin + copy * segment :][: segment - 1].tolist() for copy in range(COPIES)]
    assert outcome["ranks"].tolist() == again


def test_the_rounds_read_less_than_a_quarter_of_everything() -> None:
    for times in (2, 4, 8, 16):
        target, shorter = 256 * times, tuple(256 << step for step in range(1, times.bit_length() - 1))
        schedule = Schedule(24, 32, target, 256, shorter)
        assert (schedule.entrants, schedule.read) == ([24, 7, 3], [2, 8, 32])
        assert schedule.cost_from(0).tokens <= 24 * 32 * target / 4


def test_the_cost_is_the_most_and_in_the_end_exact(models: ModelRegistry) -> None:
    first = planned(models)
    bound = first.cost
    _, last = answered(first, {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert last.cost.tokens == sum(unit.tokens for unit in last.units) <= bound.tokens
    assert last.cost.units == last.cost.passes == len(last.units)
    assert len(first.units) < len(last.units) < first.schedule.candidates * 16


def test_the_best_is_found_and_named_with_its_evidence(models: ModelRegistry) -> None:
    result, _ = answered(planned(models), {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    assert result.answer.label == GOOD
    assert result.answer.confidence == 1.0
    assert (result.answer.native_is_enough, result.answer.tied, result.answer.recall_counts) == (False, [], True)
    assert result.answer.words[0] == f"For 256 tokens use {GOOD}."
    assert "2 attentions instead of one per layer and rotates all keys at each read" in " ".join(result.words())
    by_label = {method.label: method for method in result.methods}
    (at,) = [at for at in by_label[GOOD].lengths if at.length == LENGTH]
    assert (at.windows, at.difference, at.recall) == (16, 0.0, pytest.approx(0.8, abs=0.05))
    (own,) = [at for at in by_label["default"].lengths if at.length == LENGTH]
    assert own.difference == pytest.approx(1.7, abs=0.1), "a nat of loss and seven tenths of recall"
    assert own.windows == 16, "the model's own encoding is in every round"
    assert result.answer.avoid[0].label == "default"
    assert {method.verdict for method in result.methods} == {"recommended", "worse", "dropped"}


def test_a_table_compares_numbers_of_the_same_windows_only(models: ModelRegistry) -> None:
    result, _ = answered(planned(models), {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    table = result.overview()
    assert table is not None
    shown = {row[0]: (row[1] != "-", row[2] != "-", row[4]) for row in table.rows}
    assert shown[GOOD] == shown["default"] == (True, True, "16")
    assert {shown[method.label] for method, _ in result.ranked() if method.verdict == "dropped"} <= {
        *((False, False, windows) for windows in ("1", "4"))
    }
    assert "Candidates that left early read fewer windows" in table.caption


def test_an_encoding_that_forgets_loses_to_one_that_recalls(models: ModelRegistry) -> None:
    forgets = dict.fromkeys(WINDOWED, (1.8, 0.1))
    result, _ = answered(planned(models), {"others": (3.0, 0.1), GOOD: (2.0, 0.8), **forgets}, (2.0, 0.9))
    assert result.answer.label == GOOD
    (avoided,) = [found for found in result.answer.avoid if found.label == "streaming"]
    assert avoided.reason.startswith("it attends to 64 tokens only; it copies")


def test_every_window_shows_whether_the_model_copies(models: ModelRegistry) -> None:
    """With a quarter of them, the demo model seemed to copy nothing, and an encoding that forgets was chosen."""
    plan = planned(models)
    own = [unit for unit in plan.units if unit.length == plan.schedule.reference]
    assert len(own) == plan.schedule.windows == 16
    assert {unit.subject.label for unit in own} == {"default"}
    gains = {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}
    assert answered(planned(models), gains, (2.0, 0.15))[0].answer.recall_counts


def test_without_recall_perplexity_decides_and_windows_are_left_out(models: ModelRegistry) -> None:
    forgets = dict.fromkeys(WINDOWED, (1.8, 0.0))
    result, _ = answered(planned(models), {"others": (3.0, 0.0), GOOD: (2.0, 0.0), **forgets}, (2.0, 0.0))
    assert (result.answer.label, result.answer.recall_counts) == (GOOD, False)
    assert "This model cannot show recall" in " ".join(result.words())
    assert {method.verdict for method in result.methods if method.label in WINDOWED} == {"windowed"}


@pytest.mark.parametrize(("own", "label"), [(4.0, "lm_infinite"), (1.8, "default")])
def test_windowed_candidates_alone_are_compared_by_perplexity(models: ModelRegistry, own: float, label: str) -> None:
    """They were left out, and the own encoding was recommended at five times their perplexity."""
    made_up = {"others": (own, 0.0), "streaming": (2.0, 0.0), "lm_infinite": (1.8, 0.0)}
    methods = [{"method": name} for name in WINDOWED]
    result, _ = answered(planned(models, methods=methods), made_up, (2.0, 0.0))
    assert (result.answer.label, result.answer.recall_counts) == (label, False)
    assert "All candidates are windowed, and it does not show what they forget." in " ".join(result.words())
    assert [avoided.label for avoided in result.answer.avoid] == (["default"] if own == 4 else [])
    assert ranges_of(result)[-1] == {"up_to": LENGTH, "pe": {"method": label}}
    assert result.title() == (
        "For 256 tokens use lm_infinite by perplexity alone: it attends to 74 tokens only, and forgets the others."
        if own == 4
        else "For 256 tokens keep the model's own encoding: no candidate is better."
    )


def test_a_windowed_candidate_beside_others_is_not_called_worse(models: ModelRegistry) -> None:
    methods = [{"method": "streaming"}, BOTH[0]]
    made_up = {"others": (3.0, 0.0), "default": (2.0, 0.0), "streaming": (1.8, 0.0)}
    result, _ = answered(planned(models, methods=methods), made_up, (2.0, 0.0))
    assert result.title() == "For 256 tokens keep the model's own encoding: no candidate without a window is better."
    assert [avoided.reason for avoided in result.answer.avoid] == [
        "it attends to 64 tokens only; its perplexity is 0.819 times that of the recommended one, over 16 windows, "
        "which does not show what it forgets",
        "its perplexity is 2.72 times that of the recommended one, over 16 windows",
    ]
    assert "windowed encodings are left out" in " ".join(result.words())


def test_few_windows_do_not_show_that_a_model_cannot_recall(models: ModelRegistry) -> None:
    methods = {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}
    found = {
        (windows, shares): answered(planned(models, windows=windows), methods, (2.0, *shares))[0]
        for windows, shares in ((16, (0.9, 0.0)), (16, (0.0, 0.0)), (4, (0.1, 0.0, 0.2)), (2, (0.9, 0.0)))
    }
    assert [result.answer.recall_shown for result in found.values()] == ["yes", "no", "unsure", "unsure"]
    assert [result.answer.recall_counts for result in found.values()] == [True, False, False, False]
    unsure = " ".join(found[4, (0.1, 0.0, 0.2)].words())
    assert "4 windows are too few to show whether this model recalls: within 64 tokens it predicts" in unsure
    assert "cannot" not in unsure
    assert "This model cannot show recall" in " ".join(found[16, (0.0, 0.0)].words())


def test_a_model_that_is_good_as_it_is_gets_to_know(models: ModelRegistry) -> None:
    result, _ = answered(planned(models), {"others": (2.0, 0.8)}, (2.0, 0.8))
    assert (result.answer.label, result.answer.native_is_enough) == ("default", True)
    assert result.answer.words[0] == "For 256 tokens keep the model's own encoding: no candidate is better."
    assert ranges_of(result) == [{"up_to": LENGTH, "pe": {"method": "default"}}]


def test_within_the_trained_length_nothing_else_is_tried(models: ModelRegistry) -> None:
    result = finish(evaluate(planned(models, length=64, windows=4)))
    assert [method.label for method in result.methods] == ["default"]
    assert result.answer.words[0] == "For 64 tokens keep the model's own encoding: it was trained with 64."
    assert ranges_of(result) == [{"up_to": 64, "pe": {"method": "default"}}]


def test_shorter_lengths_get_the_proposals_for_them(models: ModelRegistry) -> None:
    made_up = {"others": (3.0, 0.1), "yarn(factor=4)": (2.0, 0.8), "yarn(factor=2)": (2.0, 0.8)}
    result, _ = answered(planned(models), made_up, (2.0, 0.9))
    assert result.answer.label == "yarn(factor=4)"
    assert ranges_of(result) == [
        {"up_to": 64, "pe": {"method": "default"}},
        {"up_to": 128, "pe": {"method": "yarn", "factor": 2.0}},
        {"up_to": 256, "pe": {"method": "yarn", "factor": 4.0}},
    ]
    rows = result.rows()
    assert {row["length"] for row in rows} == {64, 128, 256}
    assert all((row["verdict"] is None) == (row["length"] != 256) for row in rows), "a verdict is of the target length"


def test_named_candidates_stay_as_they_are(models: ModelRegistry) -> None:
    methods = [{"method": "yarn", "factor": 4.0}, {"method": "linear", "factor": 4.0}]
    made_up = {"others": (3.0, 0.1), "yarn(factor=4)": (2.0, 0.8)}
    result, plan = answered(planned(models, methods=methods), made_up, (2.0, 0.9))
    assert [method.label for method in result.methods] == ["default", "yarn(factor=4)", "linear(factor=4)"]
    assert [found.up_to for found in result.answer.ranges] == [64, 256]
    assert len(plan.stages) == 2, "three candidates are one round"


def test_a_cheaper_encoding_within_the_tolerance_serves_a_range(models: ModelRegistry) -> None:
    made_up = {"others": (3.0, 0.1), GOOD: (2.0, 0.8), "yarn(factor=4)": (2.06, 0.8)}
    result, _ = answered(planned(models), made_up, (2.0, 0.9))
    assert result.answer.label == GOOD
    assert result.answer.ranges[-1].label == "yarn(factor=4)"
    assert "yarn(factor=4) is good enough within the tolerance, and costs no more." in result.words()
    strict, _ = answered(planned(models, tolerance=0.01), made_up, (2.0, 0.9))
    assert strict.answer.ranges[-1].label == GOOD


BOTH = [{"method": "yarn", "factor": 4.0}, {"method": "self_extend", "group_size": 5}]
"""The first one is cheaper."""


def test_a_cheaper_encoding_that_may_be_too_bad_serves_no_length(models: ModelRegistry) -> None:
    """Its mean is within the tolerance, its interval reaches across: at the target and at the length before."""
    good = {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}
    sure, plan = answered(planned(models, methods=BOTH), good | {"yarn(factor=4)": (2.05, 0.8)}, (2.0, 0.9))
    assert {reading.length for reading in plan.stages[-1]} == {128}
    assert [found.label for found in sure.answer.ranges] == ["default", "yarn(factor=4)"]
    unsure, _ = answered(planned(models, methods=BOTH), good | {"yarn(factor=4)": (2.05, 0.8, 0.4)}, (2.0, 0.9))
    (yarn,) = [method for method in unsure.methods if method.label == "yarn(factor=4)"]
    assert [at.good_enough for at in yarn.lengths] == [True, True], "by the mean"
    assert unsure.answer.label == GOOD
    assert [found.label for found in unsure.answer.ranges] == ["default", GOOD]
    assert unsure.answer.tied == ["yarn(factor=4)"]
    assert "16 windows are too few to show whether yarn(factor=4), which costs less, is good enough." in unsure.words()


def test_one_that_is_worse_on_average_only_is_not_called_worse(models: ModelRegistry) -> None:
    good = {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}
    result, _ = answered(planned(models, methods=BOTH), good | {"yarn(factor=4)": (2.4, 0.8, 1.5)}, (2.0, 0.9))
    assert {method.label: method.verdict for method in result.methods} == {
        "default": "worse",
        "yarn(factor=4)": "unsure",
        GOOD: "recommended",
    }
    assert "yarn(factor=4) is worse on average, and 16 windows do not separate it." in result.words()
    assert result.answer.tied == []


@pytest.mark.parametrize(("within", "keeps"), [((2.0, 0.8), True), ((1.0, 0.9), False), ((1.9, 0.8, 1.0), None)])
def test_the_answer_says_whether_it_keeps_the_quality_of_the_trained_length(
    models: ModelRegistry, within: tuple[float, ...], keeps: bool | None
) -> None:
    result, _ = answered(planned(models, methods=BOTH), {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, within)
    assert result.answer.keeps_quality is keeps
    says = "So no candidate keeps the quality of 64 tokens: the recommended one is worse."
    assert (says in result.words()) is (keeps is False)


def test_an_answer_that_no_system_can_express_says_so_and_names_one_that_is(models: ModelRegistry) -> None:
    methods = [{"method": "rerope"}, *BOTH]
    made_up = {"others": (3.0, 0.1), "rerope": (2.0, 0.8), "yarn(factor=4)": (2.5, 0.8), GOOD: (4.0, 0.8)}
    found, _ = answered(planned(models, methods=methods), made_up, (2.0, 0.9))
    assert (found.answer.label, found.answer.exports_to, found.answer.exportable) == ("rerope", [], "yarn(factor=4)")
    assert (
        "No system that Ropeway exports to can express it; the best finalist that one can is yarn(factor=4), with "
        "0.500 more loss."
    ) in found.words()
    for label, systems in (("yarn(factor=4)", list(TARGETS)), (GOOD, ["llama.cpp"])):
        best, _ = answered(planned(models, methods=methods), made_up | {label: (1.0, 0.9)}, (2.0, 0.9))
        assert (best.answer.label, best.answer.exports_to, best.answer.exportable) == (label, systems, label)
        assert "No system" not in " ".join(best.words())


def test_one_window_is_no_reason_against_a_candidate(models: ModelRegistry) -> None:
    """Candidates that left after the first of three rounds have read 1 of 16 windows, or 2 of 32."""
    made_up = {"others": (9.0, 0.1), GOOD: (2.0, 0.8)}
    for windows, least in ((16, 4), (32, 2)):
        plan = planned(models, windows=windows, input=TEXT * 2)
        assert plan.schedule.windows == windows
        result, _ = answered(plan, made_up, (2.0, 0.9))
        read = {method.label: at.windows for method, at in result.ranked()}
        assert min(read.values()) == windows // 16
        assert min(read[avoided.label] for avoided in result.answer.avoid) == least
        assert all(f"over {read[avoided.label]} windows" in avoided.reason for avoided in result.answer.avoid)


def test_the_next_one_is_the_next_finalist(models: ModelRegistry) -> None:
    result, _ = answered(planned(models), {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, (2.0, 0.9))
    (sentence,) = [sentence for sentence in result.words() if "better than the next" in sentence]
    assert f"better than the next finalist, {result.answer.runner_up}, with" in sentence


def test_two_windows_decide_for_nothing_cheaper(models: ModelRegistry) -> None:
    made_up = {"others": (3.0, 0.1), GOOD: (2.0, 0.8), "yarn(factor=4)": (2.05, 0.8)}
    result, _ = answered(planned(models, methods=BOTH, windows=2), made_up, (2.0, 0.9))
    assert (result.answer.label, result.answer.confidence) == (GOOD, None)
    assert {method.label: method.verdict for method in result.methods}["default"] == "unsure"
    assert result.answer.avoid == [], "two windows separate nothing"
    assert [found.label for found in result.answer.ranges] == ["default", GOOD]


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
        ({"length": 1 << 20}, "lengths", "beyond"),
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
    places = _places([document, document], 60, 20, 5, seed=0)
    assert sorted(places) == sorted(set(places))
    assert {place.stop for place in places} <= {60, 80, 100}
    assert len(places) == 5
    assert _places([document, document], 60, 20, 5, seed=1) != places
    with pytest.raises(InvalidEvaluation, match="needs 120 tokens for two windows"):
        _places([document], 90, 30, 5, seed=0)


def test_a_budget_bounds_the_tokens(models: ModelRegistry) -> None:
    whole = planned(models).cost.tokens
    smaller = planned(models, budget=whole // 2)
    assert smaller.cost.tokens <= whole // 2
    assert smaller.schedule.windows < 16
    result = finish(evaluate(smaller))
    assert result.tokens_read <= whole // 2
    assert result.windows == smaller.schedule.windows


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
        with pytest.raises(InvalidEvaluation, match="positions"):
            plan_of(RecommendRequest(input=TEXT, length=128, methods=methods), models, settings_of(tmp_path))
