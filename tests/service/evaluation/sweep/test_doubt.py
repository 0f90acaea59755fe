"""Doubt in the answer of a sweep: intervals across the limit, ratios to the reference, and failures that are sure."""

from __future__ import annotations

from patches import parse
from service.evaluation.scores import Interval
from service.evaluation.sweep.judging import Judge
from service.evaluation.unit import Subject
from service.models.registry import ModelRegistry
from tests.service.evaluation.sweep.made_up import METHODS, judged, result, shares


def test_an_interval_across_the_limit_is_not_sure(models: ModelRegistry) -> None:
    methods = judged(models, [[10, 90], [10, 10.2], [11, 10.9], [10, 20]], half=0.05).methods
    assert [method.sure for method in methods] == [True, True, False, True]


def test_nothing_good_enough_is_unsure_where_an_interval_reaches_across_the_limit(models: ModelRegistry) -> None:
    curve = [[10, 90], [10, 60], [11, 11.3], [10, 11.4]]
    answer = judged(models, curve, half=0.05).answer()
    assert answer.cheapest_adequate is None
    assert (
        "; on average no method stays within 10% of the model itself at 64 tokens, but 8 documents cannot exclude that "
        "yarn(factor=4) and streaming do. Perplexity does not show that streaming cannot recall" in answer.words
    )
    curve[3] = [10, 40]
    alone = judged(models, curve, half=0.05)
    assert ", but 8 documents cannot exclude that yarn(factor=4) does. Perplexity" in alone.answer().words


def test_the_texts_that_leave_the_doubt_are_named(models: ModelRegistry) -> None:
    """None of 20 prompts, or of the quarters of a document, is surely beyond the limit."""
    found = shares(models, [[1, 0.3], [1, 0.2], [1, 0.85], [1, 0.1]]).answer()
    assert "on average no method stays within 10%" in found.words
    assert "but the prompts cannot exclude that yarn(factor=4) does." in found.words
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    made = result(subjects, [[10, 90], [10, 60], [11, 11.3], [10, 60]], 0.05)
    for method in made.methods:
        for at in method.lengths:
            assert at.interval
            at.interval.kind = "quarters"
    assert "but one document cannot exclude that" in Judge(subjects, [made], 0, 64, 256, 0.1).answer().words


def test_what_is_hard_for_both_is_no_doubt(models: ModelRegistry) -> None:
    """The documents differ by more than a nat, so no interval is on one side. Each ratio to the reference is sure."""
    curve = [[10, 90], [10, 10.2], [11, 11.4], [10, 10.9]]
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    wide = result(subjects, curve, 0.0)
    for method in wide.methods:
        for at in method.lengths:
            at.interval = Interval(low=at.perplexity / 3, high=at.perplexity * 3, kind="documents")
    methods = Judge(subjects, [wide], 0, 64, 256, 0.1).methods
    assert [method.adequate for method in methods] == [False, True, False, True]
    assert all(method.sure for method in methods)
    assert all(method.judgements[0].by_ratio for method in methods)
    assert not judged(models, curve, half=0.02).methods[3].sure, "10.9 is 0.9 % below the limit of 11"


def test_other_tokens_leave_the_doubt_about_the_reference_too(models: ModelRegistry) -> None:
    """Intervals of 5 %: by Pythagoras, the difference of 10.3 and the limit of 11 is unsure by 0.75."""
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    made = result(subjects, [[10, 90], [10, 10.3], [10, 10.2], [10, 11.7]], 0.05)
    made.protocol = "curve"
    methods = Judge(subjects, [made], 0, 64, 256, 0.1).methods
    assert [method.sure for method in methods] == [True, False, True, False]
    for method in made.methods:
        method.lengths[0].interval = None
    assert {method.sure for method in Judge(subjects, [made], 0, 64, 256, 0.1).methods} == {False}


def test_shares_and_other_tokens_are_not_judged_by_a_ratio(models: ModelRegistry) -> None:
    judged_by_share = shares(models, [[1, 1]] * 4).methods
    assert not any(at.by_ratio for method in judged_by_share for at in method.judgements if at.measure != "perplexity")
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    found = result(subjects, [[10, 90], [10, 10.2], [11, 10.9], [10, 11.5]], 0.0)
    for protocol, by_ratio in (("tail", True), ("curve", False)):
        found.protocol = protocol
        for method in found.methods:
            for at in method.lengths:
                at.interval = Interval(low=1, high=100, kind="quarters")
                at.groups = [(at.nll_mean * 64, 64)] * 8
        of_method = [method.judgements[0] for method in Judge(subjects, [found], 0, 64, 256, 0.1).methods]
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
        own, *others = judge.methods
        assert (own.is_reference, own.sure, own.judgements[0].by_ratio) == (sure, sure, False)
        assert not any(method.is_reference or method.sure for method in others)
    alone = Judge(subjects[:1], [result(subjects[:1], [[10, 90]], 0.0)], 0, 256, 256, 0.0).answer()
    assert alone.cheapest_is_sure
    assert "good enough: it is the reference, the model itself at 256 tokens." in alone.words


def test_one_evaluation_that_is_sure_of_a_failure_is_enough(models: ModelRegistry) -> None:
    sure = [method.sure for method in shares(models, [[1, 1]] * 4, [[1, 1], [1, 0], [1, 1], [1, 0.9]]).methods]
    assert sure == [False, True, False, False], "an interval around 1 reaches below 0.9, that of 0 does not reach it"
