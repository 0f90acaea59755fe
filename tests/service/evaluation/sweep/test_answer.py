"""The answer of a sweep: the best method, the cheapest that is good enough, ranks, and words."""

from __future__ import annotations

import pytest

from patches import parse
from service.evaluation.sweep.judging import Judge
from service.evaluation.unit import Subject
from service.models.registry import ModelRegistry
from tests.service.evaluation.sweep.made_up import METHODS, judged, result, shares
from tests.service.figures import examples
from tests.service.figures.measured import long_perplexity


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


def test_the_best_and_the_cheapest_that_is_good_enough(models: ModelRegistry) -> None:
    judge = judged(models, [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]])
    answer = judge.answer()
    assert (answer.best, answer.runner_up) == ("self_extend", "yarn(factor=4)")
    assert answer.cheapest_adequate == "yarn(factor=4)", "one attention instead of two"
    assert answer.confidence == 1.0
    assert answer.cheapest_is_sure
    assert [method.adequate for method in judge.methods] == [False, True, True, False]
    assert [method.rank for method in judge.methods] == [4, 1, 2, 3]
    assert "streaming cannot recall" in answer.words


def test_no_method_need_be_good_enough(models: ModelRegistry) -> None:
    answer = judged(models, [[10, 90], [10, 60], [11, 50], [10, 40]]).answer()
    assert answer.best == "streaming"
    assert answer.cheapest_adequate is None
    assert answer.words.endswith("; no method stays within 10% of the model itself at 64 tokens.")


def test_several_evaluations_have_to_agree(models: ModelRegistry) -> None:
    good, bad = [[10, 90], [10, 10.2], [11, 10.9], [10, 10.1]], [[10, 90], [10, 10.2], [11, 20], [10, 30]]
    judge = judged(models, good, bad)
    assert [method.adequate for method in judge.methods] == [False, True, False, False]
    assert judge.answer().best == "self_extend", "first and second by rank beats first and last"


def test_the_tolerance_is_the_requests(models: ModelRegistry) -> None:
    curve = [[10, 90], [10, 14], [11, 16], [10, 99]]
    assert [m.adequate for m in judged(models, curve, tolerance=0.5).methods] == [False, True, False, False]
    assert [m.adequate for m in judged(models, curve, tolerance=0.7).methods] == [False, True, True, False]


def test_costs_are_of_the_encoding(models: ModelRegistry) -> None:
    costs = [method.cost for method in judged(models, [[1.5, 2]] * 4).methods]
    assert [cost.attentions for cost in costs] == [1, 2, 1, 2]
    assert [cost.rotated_when_read for cost in costs] == [False, True, False, False]


def test_equally_good_methods_share_their_rank_and_are_all_named(models: ModelRegistry) -> None:
    judge = shares(models, [[1, 1], [1, 1], [1, 0.5], [1, 1]])
    assert [method.rank for method in judge.methods] == [1, 1, 4, 1]
    answer = judge.answer()
    assert answer.words.startswith(
        "At 256 tokens default, self_extend and streaming are equally good, and default is the cheapest that is good"
    )
    assert answer.confidence is None


def test_methods_that_differ_by_rounding_share_their_rank(models: ModelRegistry) -> None:
    """Self-Extend within its window has the numbers of plain rotation, by another order of operations."""
    judge = judged(models, [[8, 9], [8, 9 * (1 + 1e-7)], [8, 9.001], [8, 12]])
    assert [method.rank for method in judge.methods] == [1, 1, 3, 4]
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


def test_a_reference_that_finds_nothing_is_no_limit(models: ModelRegistry) -> None:
    judge = shares(models, [[0, 0], [0.5, 0.5], [0, 0.1], [0, 0]])
    answer, methods = judge.answer(), judge.methods
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


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1)])
def test_a_runner_up_with_the_better_number_is_the_next_in_any_order(
    models: ModelRegistry, order: tuple[int, ...]
) -> None:
    """self_extend and streaming have a mean rank of 2.5, and streaming has the lower perplexity in the first one."""
    curves = [[[10, 90.0], [10, 20], [10, 10.5], [10, 10.4]], [[10, 12], [10, 11], [10, 10], [10, 20]]]
    subjects = [Subject(parse(METHODS[index]), models.default.patch, "tiny") for index in order]
    results = [result(subjects, [curve[index] for index in order], 0.0) for curve in curves]
    answer = Judge(subjects, results, 0, 64, 256, 0.1).answer()
    assert (answer.best, answer.runner_up, answer.confidence) == ("yarn(factor=4)", "streaming", 0.0)
    says = "At 256 tokens yarn(factor=4) is the best over all evaluations, though streaming has the lower perplexity"
    assert answer.words.startswith(f"{says}, and ")


def test_a_table_has_the_verdict_of_each_method() -> None:
    found = examples.sweep()
    first, second, third, _ = found.methods
    for at in first.judgements:
        at.is_reference = True
    second.adequate, third.sure = True, False
    assert [row[-1] for row in found.overview().rows] == ["reference", "yes", "no?", "no"]
