"""Results beside each other: the ratio of perplexities, and refusals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from service.api.jobs.comparison import MOST
from service.evaluation.comparison import comparing
from service.evaluation.comparison.checks import COMPARABLE, Named, NotComparable
from service.evaluation.comparison.results import ComparisonResult
from service.evaluation.results import Partial
from service.reports.html import facts_of
from tests.conftest import ROOT
from tests.service.evaluation.comparing import (
    AFTER,
    BEFORE,
    DOCUMENTS,
    OTHER,
    WORSE,
    add_length,
    change_of,
    compared,
    passkey,
    perplexity,
    setup_of,
)
from tests.service.figures import measured


class TestPerplexity:
    def test_the_ratio_and_its_interval_are_those_of_a_paired_t_test(self) -> None:
        result = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})])
        change, interval = change_of(result)
        test = stats.ttest_rel(AFTER, BEFORE)
        ends = test.confidence_interval(0.95)
        assert change.value == pytest.approx(math.exp(np.mean(AFTER) - np.mean(BEFORE)), rel=1e-9)
        assert interval.low == pytest.approx(math.exp(ends.low), rel=1e-6)
        assert interval.high == pytest.approx(math.exp(ends.high), rel=1e-6)
        assert (change.verdict, interval.kind) == ("better", "documents")

    @pytest.mark.parametrize(
        ("after", "verdict"),
        [(AFTER, "better"), (WORSE, "worse"), (BEFORE, "equal"), (OTHER, "unsure")],
    )
    def test_the_verdict_is_sure_by_the_interval(self, after: list[float], verdict: str) -> None:
        result = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": after})])
        assert change_of(result)[0].verdict == verdict

    def test_partners_have_the_same_label_in_the_first_result(self) -> None:
        curves = {"default": BEFORE, "yarn(factor=4)": AFTER}
        result = compared([perplexity("a", curves, "base"), perplexity("b", {**curves, "alibi": AFTER}, "tuned")])
        partners = {method.name: method.partner for method in result.methods}
        assert partners == {
            "default (a)": None,
            "yarn(factor=4) (a)": None,
            "default (b)": "default (a)",
            "yarn(factor=4) (b)": "yarn(factor=4) (a)",
            "alibi (b)": None,
        }
        assert result.model == "base and tuned"

    def test_a_baseline_is_the_partner_of_all_others(self) -> None:
        curves = {"default": BEFORE, "yarn(factor=4)": AFTER}
        named = [perplexity("a", curves), perplexity("b", curves)]
        for baseline in ("yarn(factor=4) (b)", "yarn(factor=4)", "yarn:4"):
            result = compared(named, baseline)
            of = baseline if baseline.endswith("(b)") else "yarn(factor=4) (a)"
            assert [method.partner for method in result.methods] == [
                None if method.name == of else of for method in result.methods
            ]
            assert result.against() == of
        with pytest.raises(NotComparable, match=r"is none of default"):
            compared(named, '{"method": ' + "[" * 10_000)
        with pytest.raises(NotComparable, match="'nope' is none of default") as refused:
            compared(named, "nope")
        assert refused.value.field == "baseline"

    @pytest.mark.parametrize(
        ("labels", "models", "given", "names"),
        [
            (("default", "alibi"), "mm", True, ["default (a)", "alibi (b)"]),
            (("default", "default"), "mn", True, ["default (a)", "default (b)"]),
            (("default", "default"), "mn", False, ["default (m)", "default (n)"]),
            (("default", "default"), "mm", False, ["default (a)", "default (b)"]),
        ],
    )
    def test_models_are_names_where_no_other_ones_are_given(
        self, labels: Sequence[str], models: str, given: bool, names: list[str]
    ) -> None:
        means = zip("ab", labels, (BEFORE, AFTER), models, strict=True)
        named = [perplexity(name, {label: mean}, model) for name, label, mean, model in means]
        assert compared(named, given=given).names() == names

    def test_an_empty_name_is_the_default_whatever_the_others_are(self) -> None:
        for models, own in (("mn", ["m", "n"]), ("mm", ["place 1", "place 2"])):
            results = [perplexity("", {"default": BEFORE}, model).result for model in models]
            found = comparing.compared(results, ["tuned", ""], ["place 1", "place 2"])
            assert [source.name for source in found.sources] == ["tuned", own[1]]
            assert [source.default_name for source in found.sources] == own

    def test_methods_without_a_partner_are_named(self) -> None:
        named = [perplexity("a", {"default": BEFORE}), perplexity("b", {"alibi": AFTER})]
        caution = "The first result has no partner of alibi (b): `baseline` names one for all."
        assert compared(named).cautions() == [caution]
        assert compared(named, "default").cautions() == []

    def test_another_sure_verdict_at_a_shorter_length_is_said(self) -> None:
        """The same one is not said again, and no doubt about a shorter length."""
        first, second = perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})
        for length, mean in ((256, WORSE), (128, AFTER), (64, OTHER), (32, BEFORE)):
            add_length(first, length, BEFORE)
            add_length(second, length, mean)
        words = compared([first, second]).sentences()
        assert [(sentence.split()[1], sentence.rpartition(": ")[2]) for sentence in words if "times" in sentence] == [
            ("512", "surely better."),
            ("256", "surely worse."),
        ]

    def test_a_length_that_one_result_has_is_without_a_change(self) -> None:
        first, second = perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})
        add_length(second, 256, AFTER)
        second.result.trained_length = 128
        result = compared([first, second])
        changes = result.changes()
        assert changes is not None
        assert [list(by_length) for by_length in changes.by_method] == [[512]]
        rows = [(row["name"], row["length"], row["trained_length"], row["change"] is None) for row in result.rows()]
        assert rows == [
            ("default (a)", 512, 256, True),
            ("default (b)", 256, 128, True),
            ("default (b)", 512, 128, False),
        ]

    def test_two_documents_are_too_little_for_an_interval(self) -> None:
        documents = DOCUMENTS[:2]
        named = [perplexity("a", {"default": BEFORE[:2]}), perplexity("b", {"default": AFTER[:2]})]
        for _, result in named:
            result.documents = documents  # type: ignore[attr-defined]
        result = compared(named)
        change = result.methods[1].lengths[0].change
        assert change is not None
        assert (change.interval, change.verdict) == (None, "unsure")
        assert change.value == pytest.approx(math.exp(np.mean(AFTER[:2]) - np.mean(BEFORE[:2])))
        words = "default (b) has 0.928 times the perplexity of default (a): too little text for an interval."
        assert f"At 512 tokens, {words}" in result.sentences()

    @pytest.mark.parametrize(("methods", "rest"), [(6, ""), (7, "1 more is in"), (8, "2 more are in")])
    def test_most_pairs_are_in_the_table_alone(self, methods: int, rest: str) -> None:
        curves = {"default": BEFORE, **{f"linear(factor={factor})": AFTER for factor in range(methods)}}
        words = compared([perplexity("a", curves)]).sentences()
        assert sum("times the perplexity" in sentence for sentence in words) == 6
        found = [sentence for sentence in words if sentence.endswith("in the table of all numbers.")]
        assert found == ([f"{rest} the table of all numbers."] if rest else [])

    def test_the_best_is_that_at_a_length_that_all_have(self) -> None:
        longer = perplexity("b", {"default": AFTER})
        method = longer.result.methods[0]
        method.lengths.append(method.lengths[0].model_copy(update={"length": 1024, "perplexity": 1.5}))  # type: ignore[attr-defined]
        result = compared([perplexity("a", {"default": BEFORE}), longer])
        assert result.shared_lengths == [512]
        assert result.sentences()[0].startswith("At 512 tokens, default (b) is best")

    def test_the_answer_has_the_best_and_each_pair(self) -> None:
        result = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})])
        first, second, *_ = result.sentences()
        assert first.startswith("At 512 tokens, default (b) is best: perplexity 22.2")
        low, high = np.exp(stats.ttest_rel(AFTER, BEFORE).confidence_interval(0.95))
        text = f"0.905 ({low:.3f} to {high:.3f}) times"
        assert second == f"At 512 tokens, default (b) has {text} the perplexity of default (a): surely better."

    def test_ratios_by_length_have_a_mark_where_they_are_sure(self) -> None:
        """Partners have none, and neither do methods without a partner."""
        first = perplexity("a", {"default": BEFORE, "alibi": BEFORE})
        second = perplexity("b", {"default": AFTER, "alibi": OTHER, "yarn": AFTER})
        changes = compared([first, second]).changes()
        assert changes is not None
        assert changes.title == "Perplexity against a by context length: ratio"
        assert changes.names == ["default (b)", "alibi (b)"]
        sure, unsure = (by_length[512] for by_length in changes.by_method)
        assert (sure.text, sure.is_sure, unsure.is_sure) == ("0.905", True, False)
        assert sure.interval is not None
        assert float(sure.interval[0]) < 0.905 < float(sure.interval[1]) < 1
        assert compared([first, perplexity("b", {"yarn": AFTER})]).changes() is None

    def test_a_result_reads_back_from_its_json(self) -> None:
        result = compared([perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})])
        assert ComparisonResult.model_validate_json(result.model_dump_json()) == result

    def test_differences_beside_the_methods_are_named(self) -> None:
        named = [perplexity("a", {"default": BEFORE}), perplexity("b", {"default": AFTER})]
        for (_, result), dtype, scheme in zip(named, ("float32", "bfloat16"), (None, "int8"), strict=True):
            result.setup = setup_of("t", dtype, scheme)
        named[0].result.trained_length = 128
        named[1].result.partial = Partial(units_done=1, units_total=2, missing={"alibi": 1})
        assert compared(named).cautions() == [
            "b is partial: 1 of 2 units are finished.",
            "The trained lengths are 128 tokens of a and 256 tokens of b.",
            "The dtype differs: float32 in a and bfloat16 in b.",
            "The quantization differs: none in a and int8 in b.",
            "The fingerprint of tiny differs: float32 in a and bfloat16 in b.",
        ]

    def test_a_comparison_of_a_partial_result_is_partial(self) -> None:
        named = [perplexity(name, {"default": mean}) for name, mean in zip("abc", (BEFORE, AFTER, OTHER), strict=True)]
        assert compared(named).partial is None
        parts = [
            Partial(units_done=1, units_total=2, missing={"alibi": 1}, lacks=["lengths"]),
            Partial(units_done=3, units_total=5, missing={"alibi": 2}),
        ]
        named[0].result.partial, named[2].result.partial = parts
        result = compared(named)
        assert [source.partial for source in result.sources] == [parts[0], None, parts[1]]
        assert result.partial is not None
        assert result.partial.words() == "4 of 7 units are finished; missing: alibi (a) (1), alibi (c) (2)"
        assert result.words()[0].startswith("At the lengths and of the methods that finished: At 512 tokens")
        facts = dict(facts_of(result))
        assert facts["partial"] == result.partial.words()
        assert "missing" not in facts["sources"]


class TestRefusals:
    def changed(self, **fields: Any) -> Named:
        named = perplexity("b", {"default": AFTER})
        return Named("b", named.result.model_copy(update=fields))

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"protocol": "tail"}, "protocol is curve in a and tail in b"),
            ({"parameters": {"tail": 9}}, "parameters.tail is None in a and 9 in b"),
            (
                {"documents": DOCUMENTS[:4]},
                r"document 5 is text 4 \(100,000 tokens, hash 44444444\) in a and absent in b",
            ),
            ({"documents": DOCUMENTS[::-1]}, "document 1 is text 0 .* in a and text 4 .* in b"),
        ],
    )
    def test_other_settings_and_documents_are_refused(self, fields: dict[str, Any], why: str) -> None:
        with pytest.raises(NotComparable, match=why):
            compared([perplexity("a", {"default": BEFORE}), self.changed(**fields)])

    def test_results_must_be_two_of_one_evaluation_with_names_and_a_shared_length(self) -> None:
        first = perplexity("a", {"default": BEFORE})
        other = perplexity("b", {"default": AFTER})
        for at in other.result.methods[0].lengths:  # type: ignore[attr-defined]
            at.length = 1024
        cases = [
            ([first], "needs two results"),
            ([first, Named("a", other.result)], "two results have the name 'a'"),
            ([first, passkey("b", [1.0])], "a is of perplexity, and b of passkey"),
            ([first, Named("b", measured.probe())], "b is of probe, and comparable are those of perplexity"),
            ([first, other], "a and b share no length"),
        ]
        for results, why in cases:
            with pytest.raises(NotComparable, match=why):
                compared(results)


def test_the_page_has_the_same_limits() -> None:
    source = (ROOT / "service/ui/source/src/jobs/Comparison.tsx").read_text(encoding="utf-8")
    (listed,) = re.findall(r"COMPARABLE = \[(.*)\];", source)
    assert tuple(re.findall(r'"(\w+)"', listed)) == COMPARABLE, "then: make page"
    assert re.findall(r"MOST_COMPARED = (\d+);", source) == [str(MOST)]
