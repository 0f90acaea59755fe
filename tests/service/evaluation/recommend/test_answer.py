"""Recommendations: recall counts, ties go to the model's own encoding, and words say no more than the windows."""

from __future__ import annotations

import math

import pytest

from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.recommend.made_up import BOTH, GOOD, LENGTH, answered, planned, ranges_of

WINDOWED = ("streaming", "lm_infinite")
COSTLY = ("self_extend", "rerope", "leaky_rerope", "dual_chunk")


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


def test_late_tokens_decide_who_goes_on_and_the_last_ones_who_wins(models: ModelRegistry) -> None:
    made_up = {"others": (3.0, 0.1, 0.0, 0.0, 2.0), GOOD: (2.1, 0.1), "rerope": (2.0, 0.1, 0.0, 0.0, 0.5)}
    made_up["linear(factor=4)"] = (1.0, 0.1, 0.0, 0.0, 5.0)
    result, _ = answered(planned(models), made_up, (2.0, 0.1))
    verdicts = {method.label: method.verdict for method in result.methods}
    assert (result.answer.label, verdicts[GOOD], verdicts["linear(factor=4)"]) == ("rerope", "worse", "dropped")


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


@pytest.mark.parametrize(
    ("recall", "less"), [(0.0, "8.46 % lower perplexity"), (0.8, "0.088 less loss")], ids=["perplexity", "recall"]
)
def test_a_candidate_that_is_probably_better_is_named(models: ModelRegistry, recall: float, less: str) -> None:
    made_up = {"others": (3.0, recall), "default": (2.08, recall), "yarn(factor=4)": (2.0, recall, 0.3)}
    result, _ = answered(planned(models, methods=BOTH, windows=8), made_up, (2.0, recall))
    answer = result.answer
    assert (answer.label, answer.runner_up, answer.tied) == ("default", "yarn(factor=4)", ["yarn(factor=4)"])
    assert result.title() == "For 256 tokens keep the model's own encoding: no candidate is surely better."
    assert f"yarn(factor=4) has {less} on average, and 8 windows do not separate the two." in result.words()
    assert "as good as far as" not in " ".join(result.words())


def test_the_own_encoding_alone_is_compared_with_nothing(models: ModelRegistry) -> None:
    plan = planned(models, methods=[{"method": "default"}], windows=4)
    result, _ = answered(plan, {"others": (2.0, 0.0)}, (2.0, 0.0))
    assert result.title() == "For 256 tokens keep the model's own encoding: there was no other candidate."
    assert "windowed" not in " ".join(result.words())


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


def test_a_cheaper_encoding_within_the_tolerance_serves_a_range(models: ModelRegistry) -> None:
    made_up = {"others": (3.0, 0.1), GOOD: (2.0, 0.8), "yarn(factor=4)": (2.06, 0.8)}
    result, _ = answered(planned(models), made_up, (2.0, 0.9))
    assert result.answer.label == GOOD
    assert result.answer.ranges[-1].label == "yarn(factor=4)"
    uses = "The policy uses yarn(factor=4) at 256 tokens: it is within the tolerance, and it costs less."
    assert uses in result.words()
    assert (
        result.title() == f"For 256 tokens use {GOOD}, or yarn(factor=4), which costs less and is within the tolerance."
    )
    strict, _ = answered(planned(models, tolerance=0.01), made_up, (2.0, 0.9))
    assert strict.answer.ranges[-1].label == GOOD


@pytest.mark.parametrize(
    ("best", "used"),
    [
        (GOOD, ": it is within the tolerance, and it costs less."),
        ("yarn(factor=4)", ": it is within the tolerance, and it is the model's own."),
    ],
)
def test_an_encoding_that_the_policy_uses_is_not_one_to_avoid(models: ModelRegistry, best: str, used: str) -> None:
    made_up = {"others": (3.5, 0.8), "default": (2.4, 0.8), best: (2.0, 0.8)}
    wide, _ = answered(planned(models, methods=BOTH, tolerance=1), made_up, (2.0, 0.9))
    assert (wide.answer.label, [found.label for found in wide.answer.ranges]) == (best, ["default"])
    assert f"The policy uses default at 256 tokens{used}" in wide.words()
    cheaper = ", or default, which costs less and is within the tolerance" if best == GOOD else ""
    assert wide.title() == f"For 256 tokens use {best}{cheaper}."
    assert "default" not in [found.label for found in wide.answer.avoid]
    strict, _ = answered(planned(models, methods=BOTH), made_up, (2.0, 0.9))
    assert [found.label for found in strict.answer.ranges] == ["default", best]
    assert "default" in [found.label for found in strict.answer.avoid]


@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_is_the_nll_and_the_share_that_is_not_recalled(models: ModelRegistry, counts: bool) -> None:
    methods = [*BOTH, {"method": "streaming", "window": 40, "sink_tokens": 2}]
    own_within = (2.0, 0.9) if counts else (2.0, 0.0)
    result, _ = answered(planned(models, methods=methods), {"others": (3.0, 0.1), GOOD: (2.0, 0.8)}, own_within)
    assert result.answer.recall_counts == counts
    for method in result.methods:
        for at in method.lengths:
            assert at.loss == pytest.approx(math.log(at.perplexity) + (1 - at.recall if counts else 0))
    assert [method.memory.tokens for method in result.methods] == [256, 256, 256, 42]


def test_of_candidates_that_surely_are_as_good_the_cheapest_is_the_answer(models: ModelRegistry) -> None:
    """It is not sure where its interval is partly above the tolerance."""
    made_up = {"others": (3.5, 0.8), GOOD: (2.0, 0.8), "yarn(factor=4)": (2.001, 0.8, 0.01)}
    result, _ = answered(planned(models, methods=BOTH), made_up, (2.0, 0.9))
    cheap = result.methods[1].lengths[-1]
    assert (result.answer.label, result.answer.tied) == ("yarn(factor=4)", [GOOD])
    assert 0 < cheap.difference < cheap.difference_interval.high
    between = (cheap.difference + cheap.difference_interval.high) / 2
    strict, _ = answered(planned(models, methods=BOTH, tolerance=between), made_up, (2.0, 0.9))
    assert (strict.answer.label, strict.answer.tied) == (GOOD, ["yarn(factor=4)"])


@pytest.mark.parametrize(("loss", "doubtful"), [(2.0, True), (3.0, False)])
def test_more_documents_are_the_way_out_of_doubt(models: ModelRegistry, loss: float, doubtful: bool) -> None:
    """A tie is one. Over windows of one document, more windows help too."""
    caution = "Windows of one document are alike: more documents compare candidates better than more windows."
    made_up = {"others": (3.5, 0.8), GOOD: (2.0, 0.8), "yarn(factor=4)": (loss, 0.8, 0.01)}
    for given, by_document in (([TEXT[at : at + 1500] for at in range(0, 7500, 1500)], True), (TEXT, False)):
        plan = planned(models, input=given, methods=BOTH)
        result, _ = answered(plan, made_up, (2.0, 0.9))
        (interval,) = (at.perplexity_interval for at in result.methods[2].lengths if at.length == 256)
        assert interval is not None
        assert (interval.kind == "documents") == by_document
        assert (caution in result.words()) == (doubtful and by_document)


def test_within_the_trained_length_the_policy_keeps_the_own_encoding(models: ModelRegistry) -> None:
    plan = planned(models, methods=BOTH, length=64)
    result, _ = answered(plan, {"others": (2.0, 0.8)}, (3.0, 0.8))
    assert (result.answer.native_is_enough, ranges_of(result)) == (False, [{"up_to": 64, "pe": {"method": "default"}}])
    says = "The policy uses default at 64 tokens, as at every length up to the 64 of its training."
    assert says in result.words()
    assert result.title() == "For 64 tokens use yarn(factor=4)."
    costly, _ = answered(plan, {"others": (3.0, 0.8), GOOD: (2.0, 0.8)}, (3.0, 0.8))
    assert costly.title() == f"For 64 tokens use {GOOD}.", "the encoding of the policy is worse"
    assert result.answer.avoid == []


@pytest.mark.parametrize(
    ("own", "stays"), [((2.05, 0.8, 0.4), True), ((2.3, 0.8, 0.4), False), ((2.08, 0.8, 0.05), False)]
)
def test_the_own_encoding_stays_at_shorter_lengths_that_do_not_separate_it(
    models: ModelRegistry, own: tuple[float, ...], stays: bool
) -> None:
    made_up = {"others": (3.0, 0.8), "default": (2.0, 0.8), "default 128": own, "yarn(factor=4) 128": (2.0, 0.8)}
    result, _ = answered(planned(models, methods=BOTH), made_up, (2.0, 0.8))
    assert result.answer.label == "default"
    found = [(used.up_to, used.label) for used in result.answer.ranges]
    assert found == ([(256, "default")] if stays else [(64, "default"), (128, "yarn(factor=4)"), (256, "default")])


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


def test_the_best_of_the_least_cost_is_measured_as_long_as_it_may_be_good_enough(models: ModelRegistry) -> None:
    """It was dropped after one window, and a policy never had it."""
    plan = planned(models)
    costly = {each.label: (2.0, 0.0) for each in plan.subjects if each.method.method in COSTLY}
    for nll, rounds, used in ((2.05, 3, "yarn(factor=4)"), (3.0, 2, GOOD)):
        made_up = {"others": (4.0, 0.0), **costly, GOOD: (1.98, 0.0), "yarn(factor=4)": (nll, 0.0)}
        result, last = answered(plan, made_up, (2.0, 0.0))
        assert {method.label: method.rounds for method in result.methods}["yarn(factor=4)"] == rounds
        assert (result.answer.label, result.answer.ranges[-1].label) == (GOOD, used)
        assert last.cost.tokens <= plan.cost.tokens
        near = [method for method, at in result.ranked() if method.verdict == "dropped" and at.good_enough]
        (says,) = [sentence for sentence in result.words() if "another seed may name one" in sentence]
        assert says.startswith(f"{len(near)} dropped candidates were within the tolerance, among them ")
        named = says.partition("among them ")[2].partition(":")[0]
        assert len(named.replace(" and ", ", ").split(", ")) == 3 < len(near)


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
