"""The methods of one result beside the model's own encoding, and beside another baseline."""

from __future__ import annotations

import math

import pytest

from service.evaluation.comparison.checks import COMPARABLE, Named, NotComparable
from service.evaluation.comparison.within import changes_of
from service.evaluation.results import Partial
from service.figures.results import picture_of, pictures_of
from service.reports.numbers import summaries
from tests.service.evaluation.comparing import AFTER, BEFORE, WORSE, change_of, compared, perplexity
from tests.service.figures import measured
from tests.service.figures.examples import EVERY


def test_its_methods_are_beside_the_models_own_encoding() -> None:
    named = perplexity("a", {"yarn(factor=4)": AFTER, "default": BEFORE, "alibi": WORSE})
    result = compared([named])
    assert result.names() == ["yarn(factor=4)", "default", "alibi"]
    assert [method.partner for method in result.methods] == ["default", None, "default"]
    pair = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})])
    assert result.methods[0].lengths[0].change == change_of(pair)[0]
    found = compared([named], "alibi")
    assert [method.partner for method in found.methods] == ["alibi", "alibi", None]


def test_without_the_own_encoding_the_first_method_is_the_partner() -> None:
    """The `default` of a variant is another model's own encoding."""
    named = perplexity("a", {"yarn(factor=4)": AFTER, "default": BEFORE})
    named.result.methods[1].model = "variant"
    assert [method.partner for method in compared([named]).methods] == [None, "yarn(factor=4)"]


def test_a_single_method_has_no_partner() -> None:
    named = perplexity("a", {"default": BEFORE})
    with pytest.raises(NotComparable, match="two results at least, or one of several methods") as refused:
        compared([named])
    assert refused.value.field == "jobs"
    assert changes_of(named.result) is None


def test_its_tables_and_pictures_have_the_changes() -> None:
    result = perplexity("a", {"default": BEFORE, "yarn(factor=4)": AFTER}, "tiny").result
    changes = changes_of(result)
    assert changes is not None
    assert (changes.title, changes.names) == (
        "Perplexity against default by context length: ratio",
        ["yarn(factor=4)"],
    )
    assert summaries(result)[-1].caption.startswith(changes.title)
    assert [picture.name for picture in pictures_of(result)] == ["perplexity", "change"]


@pytest.mark.parametrize("evaluation", EVERY)
def test_only_numbers_by_method_and_length_have_changes(evaluation: str) -> None:
    result = EVERY[evaluation]()
    assert (changes_of(result) is not None) == (evaluation in COMPARABLE)


def test_a_result_without_numbers_has_none() -> None:
    result = measured.long_perplexity()
    for method in result.methods:
        for at in method.lengths:
            at.long_perplexity, at.key_tokens = None, 0
    assert changes_of(result) is None
    with pytest.raises(NotComparable, match="a has no numbers: nothing could be measured"):
        compared([Named("a", result)])


def test_missing_units_are_named_by_their_method_alone() -> None:
    named = perplexity("a", {"default": BEFORE, "alibi": AFTER})
    named.result.partial = Partial(units_done=2, units_total=3, missing={"none": 1})
    partial = compared([named]).partial
    assert partial is not None
    assert partial.missing == {"none": 1}


@pytest.mark.parametrize(("factor", "kind"), [(1.2, None), (30.0, "log")])
def test_ratios_far_apart_have_a_logarithmic_axis(factor: float, kind: str | None) -> None:
    worse = [nll + math.log(factor) for nll in BEFORE]
    figure = picture_of(perplexity("a", {"default": BEFORE, "none": worse}).result, "change").figure
    assert figure.layout.yaxis.type == kind
    low, high = figure.layout.yaxis.range
    inside = (0, math.log10(factor)) if kind else (1, factor)
    assert low < inside[0] < inside[1] < high
