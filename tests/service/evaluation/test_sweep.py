"""Sweeps: the numbers are those of the parts alone, and the answer follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from patches import parse
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.perplexity.plan import plan_of as perplexity_plan
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult, Interval
from service.evaluation.statistics.proportion import wilson
from service.evaluation.sweep.judging import Judge
from service.evaluation.sweep.plan import plan_of
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.unit import Subject, evaluate
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, registry, settings_of
from tests.service.figures import examples
from tests.service.figures.measured import long_perplexity
from tests.service.results import result_of

YARN, LINEAR = {"method": "yarn", "factor": 4.0}, {"method": "linear", "factor": 2.0}
PART: dict[str, Any] = {"evaluation": "perplexity", "input": TEXT}
NEEDLE: dict[str, Any] = {
    **{"evaluation": "needle", "input": TEXT, "samples": 1, "depths": [0.5], "max_new_tokens": 2},
    **{"needle": "It is Q.", "question": "It is", "expected": ["Q"]},
}


@pytest.fixture(scope="module")
def models(checkpoints: Path) -> Iterator[ModelRegistry]:
    yield from registry(checkpoints / "tiny")


def plan(models: ModelRegistry, **body: Any) -> Any:
    return plan_of(SweepRequest(**body), models, settings_of(Path("tiny")))


def labels(request: SweepRequest) -> list[str]:
    return [f"{method.method}:{getattr(method, 'factor', '-')}" for method in request.expanded()]


def test_every_method_that_takes_a_factor_is_measured_under_each() -> None:
    body = {"methods": [LINEAR, {"method": "none"}, YARN], "factors": [2, 8]}
    assert labels(SweepRequest(**body)) == ["linear:2.0", "linear:8.0", "none:-", "yarn:2.0", "yarn:8.0"]
    repeated = SweepRequest(methods=[LINEAR, {"method": "linear", "factor": 8.0}], factors=[2, 8])
    assert labels(repeated) == ["linear:2.0", "linear:8.0"]


@pytest.mark.parametrize("linear", ["linear", {"method": "linear"}])
def test_a_method_needs_no_factor_beside_factors(linear: Any) -> None:
    assert labels(SweepRequest(methods=[linear, "none"], factors=[2, 8])) == ["linear:2.0", "linear:8.0", "none:-"]
    assert labels(SweepRequest(methods=linear, factors=[4])) == ["linear:4.0"]
    with pytest.raises(ValidationError, match="factor"):
        SweepRequest(methods=[linear])


def test_factors_keep_the_other_parameters() -> None:
    (method,) = SweepRequest(methods=[YARN | {"beta_fast": 16.0}], factors=[8]).expanded()
    assert method == parse({"method": "yarn", "factor": 8.0, "beta_fast": 16.0})


def test_the_parts_are_the_evaluations_alone(models: ModelRegistry) -> None:
    own, part = {"protocol": "tail", "tail": 16}, PART | {"input": TEXT[:8000]}
    whole = finish(evaluate(plan(models, methods=[YARN, LINEAR], lengths=[64, 128], evaluations=[part | own, part])))
    methods = [{"method": "default"}, YARN, LINEAR]
    for found, options in zip(whole.evaluations, (own, {"protocol": "tail", "windows": 8}), strict=True):
        request = PerplexityRequest(input=part["input"], methods=methods, lengths=[64, 128], **options)
        alone = finish(evaluate(perplexity_plan(request, models, settings_of(Path("tiny")))))
        assert found.numbers() == alone.numbers()


def test_perplexity_in_a_sweep_scores_the_same_tokens_at_every_length(models: ModelRegistry) -> None:
    """Under `curve`, the reference length has other tokens than the target, and the limit was theirs."""
    for parts in ([PART], [{"evaluation": "perplexity", "input": TEXT, "tail": 16}], ["perplexity"], None):
        body = {} if parts is None else {"evaluations": parts}
        (part,) = plan(models, methods=[YARN], lengths=[64, 256], **body).parts
        assert (part.protocol, part.most_windows) == ("tail", 8)
        for document in part.documents:
            scored = [{(w.first_scored, w.stop) for w in part.windows(document, length)} for length in (64, 256)]
            assert scored[0] == scored[1]
            assert len(scored[0]) <= 8
    (curve,) = plan(models, methods=[YARN], lengths=[64, 256], evaluations=[PART | {"protocol": "curve"}]).parts
    assert curve.protocol == "curve"


def test_a_sweep_by_curve_warns_of_other_tokens(models: ModelRegistry) -> None:
    made = [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]]
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    found = {protocol: result(subjects, made, 0.0) for protocol in ("curve", "tail")}
    for protocol, of in found.items():
        of.protocol = protocol
    words = {protocol: Judge(subjects, [of], 0, 64, 256, 0.1).answer().words for protocol, of in found.items()}
    warning = " Under curve each length scores other tokens, so the limit is biased: the protocol tail scores the same."
    assert words["curve"] == words["tail"] + warning
    assert [long_perplexity().model_copy(update={"protocol": name}).scores_the_same() for name in found] == [
        False,
        True,
    ]


def test_a_table_has_every_length_and_judges_the_target(models: ModelRegistry) -> None:
    whole = finish(evaluate(plan(models, methods=[YARN], lengths=[32, 64, 128], evaluations=[PART])))
    rows = whole.rows()
    assert [(row["method"], row["length"]) for row in rows] == [
        (method.label, length) for method in whole.methods for length in (32, 64, 128)
    ]
    by_method = whole.evaluations[0].scores().by_method
    assert [row["value"] for row in rows] == [scores[length].value for scores in by_method for length in (32, 64, 128)]
    assert [row["rank"] is None for row in rows] == [True, True, False] * len(whole.methods)


def test_the_order_of_units_does_not_matter(models: ModelRegistry) -> None:
    sweep = plan(
        models,
        methods=[YARN],
        lengths=[64, 128],
        evaluations=[PART, NEEDLE],
    )
    forwards = [finish(unit.run()) for unit in sweep.units]
    backwards = [finish(unit.run()) for unit in reversed(sweep.units)][::-1]
    assert sweep.result(forwards).numbers() == sweep.result(backwards).numbers()
    kinds = {type(part).__name__ for part in sweep.result(forwards).evaluations}
    assert kinds == {"PerplexityResult", "NeedleResult"}


def test_a_target_within_training_is_compared_with_the_model_itself_there(models: ModelRegistry) -> None:
    """It was compared with the longest measured length of the training, where more context helps every token."""
    sweep = plan(models, methods=[YARN], lengths=[24, 48, 64], target={"length": 32}, evaluations=[PART])
    assert (sweep.within, sweep.target) == (32, 32)


def test_a_length_within_training_and_the_target_are_measured_too(models: ModelRegistry) -> None:
    sweep = plan(models, methods=[YARN], lengths=[128], target={"length": 256}, evaluations=[PART])
    assert sweep.parts[0].lengths == [64, 128, 256]
    assert (sweep.within, sweep.target) == (64, 256)
    assert [subject.label for subject in sweep.subjects] == ["default", "yarn(factor=4)"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"evaluations": [PART], "lengths": [1 << 20]}, "lengths", "beyond"),
        ({"evaluations": [PART | {"protocol": "tail", "tail": 64}], "lengths": [64]}, "evaluations.0.tail", "below"),
        ({"evaluations": [PART], "methods": [{"method": "t5_bias"}]}, "methods", "t5_bias: "),
        ({"evaluations": [PART | {"input": ["A text.", "read.txt"]}]}, "evaluations.0.input", r"input: input\[1\]: '"),
    ],
    ids=["lengths", "part", "method", "document"],
)
def test_what_is_wrong_is_named(models: ModelRegistry, body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidEvaluation, match=message) as refused:
        plan(models, **body)
    assert refused.value.param == param
    assert str(refused.value).count(param) == 1


def test_lengths_that_the_sweep_adds_are_named_where_one_is_at_fault(models: ModelRegistry) -> None:
    with pytest.raises(InvalidEvaluation, match=r"64 tokens are too few.*; a sweep also measures 64 ") as refused:
        plan(models, methods=[YARN], lengths=[512], target={"length": 512}, evaluations=["passkey"])
    assert refused.value.param == "lengths"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"evaluations": [PART | {"lengths": [64]}]}, "lengths belong to the sweep itself"),
        ({"evaluations": [{"evaluation": "sweep"}]}, "evaluation"),
        ({"methods": [{"method": "none"}], "factors": [2]}, "none of the methods takes a factor"),
        ({"factors": [0.5], "methods": [YARN]}, "greater than or equal to 1"),
        ({"factors": [5000], "methods": [YARN]}, "must be at most 4096, not 5000"),
        ({"target": {"tolerance": -0.1}}, "greater than or equal to 0"),
        ({"input": "A text."}, r"unknown field: put it into a part, such as evaluations\[0\].input of perplexity"),
        ({"digits": 5}, r"unknown field: put it into a part, such as evaluations\[0\].digits of passkey"),
        ({"lenghts": [64]}, r"unknown field: did you mean lengths\?"),
    ],
)
def test_bodies_that_make_no_sense_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SweepRequest(**body)


# The answer


LENGTHS = [64, 256]
METHODS = [{"method": "default"}, {"method": "self_extend"}, YARN, {"method": "streaming"}]


def judged(models: ModelRegistry, *curves: list[list[float]], tolerance: float = 0.1, half: float = 0.0) -> Judge:
    """Judges the four methods by perplexities at 64 and 256 tokens. Intervals reach ``half`` of a number to each side.
    So does that of its ratio to the number at the other length."""
    patch = models.default.patch
    subjects = [Subject(parse(fields), patch, "tiny") for fields in METHODS]
    return Judge(subjects, [result(subjects, curve, half) for curve in curves], 0, 64, 256, tolerance)


def result(subjects: list[Subject], curve: list[list[float]], half: float) -> PerplexityResult:
    named = {subject.label: values for subject, values in zip(subjects, curve, strict=True)}
    made = result_of(named, LENGTHS, trained_length=64, documents=[f"input[{index}]" for index in range(8)])
    made.protocol = "tail"
    hard = np.random.default_rng(0).normal(size=8)
    turns = half * np.sqrt(7) / 2.364624 * np.array([1, -1] * 4)  # Student's t of seven degrees of freedom
    for method, values in zip(made.methods, curve, strict=True):
        for at, value in zip(method.lengths, values, strict=True):
            at.interval = Interval(low=value * (1 - half), high=value * (1 + half), kind="documents")
            nll = np.log(value) + hard + (turns if at.length == LENGTHS[-1] else 0)
            at.groups = [(float(100 * of_document), 100) for of_document in nll]
    return made


def test_the_best_and_the_cheapest_that_is_good_enough(models: ModelRegistry) -> None:
    judge = judged(models, [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]])
    answer = judge.answer()
    assert (answer.best, answer.runner_up) == ("self_extend", "yarn(factor=4)")
    assert answer.cheapest_adequate == "yarn(factor=4)", "one attention instead of two"
    assert answer.confidence == 1.0
    assert answer.cheapest_is_sure
    assert [method.adequate for method in judge.methods()] == [False, True, True, False]
    assert [method.rank for method in judge.methods()] == [4, 1, 2, 3]
    assert "streaming cannot recall" in answer.words


def test_an_interval_across_the_limit_is_not_sure(models: ModelRegistry) -> None:
    methods = judged(models, [[10, 90], [10, 10.2], [11, 10.9], [10, 20]], half=0.05).methods()
    assert [method.sure for method in methods] == [True, True, False, True]


def test_no_method_need_be_good_enough(models: ModelRegistry) -> None:
    answer = judged(models, [[10, 90], [10, 60], [11, 50], [10, 40]]).answer()
    assert answer.best == "streaming"
    assert answer.cheapest_adequate is None
    assert answer.words.endswith("; no method stays within 10% of the model itself at 64 tokens.")


def test_nothing_good_enough_is_unsure_where_an_interval_reaches_across_the_limit(models: ModelRegistry) -> None:
    curve = [[10, 90], [10, 60], [11, 11.3], [10, 11.4]]
    answer = judged(models, curve, half=0.05).answer()
    assert answer.cheapest_adequate is None
    assert (
        "; no method surely stays within 10% of the model itself at 64 tokens, but yarn(factor=4) and streaming may. "
        "Perplexity does not show that streaming cannot recall" in answer.words
    )
    curve[3] = [10, 40]
    assert ", but yarn(factor=4) may. Perplexity" in judged(models, curve, half=0.05).answer().words


def test_what_is_hard_for_both_is_no_doubt(models: ModelRegistry) -> None:
    """The documents differ by more than a nat, so no interval is on one side. Each ratio to the reference is sure."""
    curve = [[10, 90], [10, 10.2], [11, 11.4], [10, 10.9]]
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    wide = result(subjects, curve, 0.0)
    for method in wide.methods:
        for at in method.lengths:
            at.interval = Interval(low=at.perplexity / 3, high=at.perplexity * 3, kind="documents")
    methods = Judge(subjects, [wide], 0, 64, 256, 0.1).methods()
    assert [method.adequate for method in methods] == [False, True, False, True]
    assert all(method.sure for method in methods)
    assert all(method.judgements[0].by_ratio for method in methods)
    assert not judged(models, curve, half=0.02).methods()[3].sure, "10.9 is 0.9 % below the limit of 11"


def test_other_tokens_leave_the_doubt_about_the_reference_too(models: ModelRegistry) -> None:
    """Intervals of 5 %: by Pythagoras, the difference of 10.3 and the limit of 11 is unsure by 0.75."""
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    made = result(subjects, [[10, 90], [10, 10.3], [10, 10.2], [10, 11.7]], 0.05)
    made.protocol = "curve"
    methods = Judge(subjects, [made], 0, 64, 256, 0.1).methods()
    assert [method.sure for method in methods] == [True, False, True, False]
    for method in made.methods:
        method.lengths[0].interval = None
    assert {method.sure for method in Judge(subjects, [made], 0, 64, 256, 0.1).methods()} == {False}


def test_several_evaluations_have_to_agree(models: ModelRegistry) -> None:
    good, bad = [[10, 90], [10, 10.2], [11, 10.9], [10, 10.1]], [[10, 90], [10, 10.2], [11, 20], [10, 30]]
    judge = judged(models, good, bad)
    assert [method.adequate for method in judge.methods()] == [False, True, False, False]
    assert judge.answer().best == "self_extend", "first and second by rank beats first and last"


def test_the_tolerance_is_the_requests(models: ModelRegistry) -> None:
    curve = [[10, 90], [10, 14], [11, 16], [10, 99]]
    assert [m.adequate for m in judged(models, curve, tolerance=0.5).methods()] == [False, True, False, False]
    assert [m.adequate for m in judged(models, curve, tolerance=0.7).methods()] == [False, True, True, False]


def test_costs_are_of_the_encoding(models: ModelRegistry) -> None:
    costs = [method.cost for method in judged(models, [[1.5, 2]] * 4).methods()]
    assert [cost.attentions for cost in costs] == [1, 2, 1, 2]
    assert [cost.rotated_when_read for cost in costs] == [False, True, False, False]


def shares(models: ModelRegistry, *grids: list[list[float]], curves: Sequence[list[list[float]]] = ()) -> Judge:
    """Judges the four methods by shares found at 64 and 256 tokens, of 20 prompts; ``curves`` are perplexities."""
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    results: list[EvaluationResult] = [result(subjects, curve, 0.0) for curve in curves]
    for grid in grids:
        found = examples.passkey([subject.label for subject in subjects])
        for method, values in zip(found.methods, grid, strict=True):
            method.lengths = [
                at.model_copy(update={"length": n, "score": value, "interval": wilson(round(20 * value), 20)})
                for at, n, value in zip(method.lengths, LENGTHS, values, strict=False)
            ]
        results.append(found)
    return Judge(subjects, results, 0, 64, 256, 0.1)


def test_equally_good_methods_share_their_rank_and_are_all_named(models: ModelRegistry) -> None:
    judge = shares(models, [[1, 1], [1, 1], [1, 0.5], [1, 1]])
    assert [method.rank for method in judge.methods()] == [1, 1, 4, 1]
    answer = judge.answer()
    assert answer.words.startswith(
        "At 256 tokens default, self_extend and streaming are equally good, and default is the cheapest that is good"
    )
    assert answer.confidence is None


def test_methods_that_differ_by_rounding_share_their_rank(models: ModelRegistry) -> None:
    """Self-Extend within its window has the numbers of plain rotation, by another order of operations."""
    judge = judged(models, [[8, 9], [8, 9 * (1 + 1e-7)], [8, 9.001], [8, 12]])
    assert [method.rank for method in judge.methods()] == [1, 1, 3, 4]
    answer = judge.answer()
    assert answer.words.startswith("At 256 tokens default and self_extend are equally good")
    assert answer.confidence == 0.5


def test_one_method_alone_is_not_called_the_best(models: ModelRegistry) -> None:
    """As in the result of a sweep that was cancelled after its first method."""
    subjects = [Subject(parse(METHODS[0]), models.default.patch, "tiny")]

    def words(curve: list[float]) -> str:
        return Judge(subjects, [result(subjects, [curve], 0.0)], 0, 64, 256, 0.1).answer().words

    assert words([10, 10.5]).startswith(
        "At 256 tokens only default was measured, and default is the cheapest that is good enough: within 10%"
    )
    assert words([10, 90]) == (
        "At 256 tokens only default was measured; no method stays within 10% of the model itself at 64 tokens."
    )


def test_nothing_found_by_anyone_is_no_victory(models: ModelRegistry) -> None:
    words = shares(models, [[0.9, 0]] * 4).answer().words
    assert words == "At 256 tokens every method fails; no method stays within 10% of the model itself at 64 tokens."


def test_shares_and_other_tokens_are_not_judged_by_a_ratio(models: ModelRegistry) -> None:
    judged_by_share = shares(models, [[1, 1]] * 4).methods()
    assert not any(at.by_ratio for method in judged_by_share for at in method.judgements if at.measure != "perplexity")
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    found = result(subjects, [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]], 0.0)
    for protocol, by_ratio in (("tail", True), ("curve", False)):
        found.protocol = protocol
        for method in found.methods:
            for at in method.lengths:
                at.interval = Interval(low=1, high=100, kind="quarters")
                at.groups = [(at.nll_mean * 64, 64)] * 8
        of_method = [method.judgements[0] for method in Judge(subjects, [found], 0, 64, 256, 0.1).methods()]
        assert [at.by_ratio for at in of_method] == [by_ratio] * 4


def test_the_reference_itself_is_no_doubt(models: ModelRegistry) -> None:
    """Too few tokens for an interval leave no doubt that it equals itself."""
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    few = result(subjects, [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]], 0.0)
    for method in few.methods:
        for at in method.lengths:
            at.interval, at.groups = None, []
    for within, sure in ((256, True), (64, False)):
        judge = Judge(subjects, [few], 0, within, 256, 0.0)
        own, *others = judge.methods()
        assert (own.is_reference, own.sure, own.judgements[0].by_ratio) == (sure, sure, False)
        assert not any(method.is_reference or method.sure for method in others)
    alone = Judge(subjects[:1], [result(subjects[:1], [[10, 90]], 0.0)], 0, 256, 256, 0.0).answer()
    assert alone.cheapest_is_sure
    assert "good enough: it is the reference, the model itself at 256 tokens." in alone.words


def test_a_reference_that_finds_nothing_is_no_limit(models: ModelRegistry) -> None:
    judge = shares(models, [[0, 0], [0.5, 0.5], [0, 0.1], [0, 0]])
    answer, methods = judge.answer(), judge.methods()
    assert (answer.best, answer.cheapest_adequate) == ("self_extend", None)
    assert answer.words == (
        "At 256 tokens self_extend is best; nothing was found by the model itself at 64 tokens, so there is nothing to "
        "compare with."
    )
    assert {(method.adequate, method.sure) for method in methods} == {(False, False)}
    assert {method.judgements[0].adequate for method in methods} == {None}


GOOD = [[10, 90], [10, 10.2], [10, 60], [10, 10.1]]
"""Perplexities: self_extend and streaming are good enough, and streaming costs less."""


def test_retrieval_that_finds_nothing_leaves_the_caution(models: ModelRegistry) -> None:
    answer = shares(models, [[0, 0]] * 4, curves=[GOOD]).answer()
    assert answer.words.endswith(
        " Perplexity does not show that streaming cannot recall, and the model itself recalls nothing."
    )
    assert "recall" not in shares(models, [[1, 1]] * 4, curves=[GOOD]).answer().words


def test_a_windowed_method_is_the_cheapest_with_evidence_of_recall_or_without_a_rival(models: ModelRegistry) -> None:
    assert judged(models, GOOD).answer().cheapest_adequate == "self_extend"
    assert "self_extend is the cheapest without a window that is good enough" in judged(models, GOOD).answer().words
    assert shares(models, [[0, 0]] * 4, curves=[GOOD]).answer().cheapest_adequate == "self_extend"
    assert shares(models, [[1, 1]] * 4, curves=[GOOD]).answer().cheapest_adequate == "streaming"
    assert "without a window" not in shares(models, [[1, 1]] * 4, curves=[GOOD]).answer().words
    alone = [[10, 90], [10, 60], [10, 60], [10, 10.1]]
    assert judged(models, alone).answer().cheapest_adequate == "streaming"


def test_one_evaluation_that_is_sure_of_a_failure_is_enough(models: ModelRegistry) -> None:
    sure = [method.sure for method in shares(models, [[1, 1]] * 4, [[1, 1], [1, 0], [1, 1], [1, 0.9]]).methods()]
    assert sure == [False, True, False, False], "an interval around 1 reaches below 0.9, that of 0 does not reach it"


def test_no_number_at_the_target_has_no_best(models: ModelRegistry) -> None:
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    result = examples.long_perplexity([subject.label for subject in subjects])
    answer = Judge(subjects, [result], 0, 512, 256, 0.1).answer()
    assert (answer.best, answer.runner_up, answer.cheapest_adequate) == (None, None, None)
    assert answer.words == "At 256 tokens nothing could be measured."


def test_a_probability_says_by_which_evaluation(models: ModelRegistry) -> None:
    curve = [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]]
    assert "(better than the next with probability above 0.99)" in judged(models, curve).answer().words
    both = judged(models, curve, curve).answer()
    assert "(better than the next by perplexity with probability above 0.99)" in both.words


def test_default_lengths_are_those_that_the_server_takes(checkpoints: Path) -> None:
    settings = settings_of(checkpoints / "tiny", score_tokens=200)
    models = ModelRegistry(settings)
    try:
        assert plan_of(SweepRequest(evaluations=[PART]), models, settings).parts[0].lengths == [64, 128]
    finally:
        models.close()
