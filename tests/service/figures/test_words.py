"""Answers in words: every number in them is the result's."""

from __future__ import annotations

import re

import pytest
from rich.text import Text

from service.evaluation.results import EvaluationResult, Part, Partial
from service.evaluation.scores import Interval
from service.figures import pictures_of
from service.reports.html import report_of
from service.reports.terminal import table_of
from tests.service.figures import examples
from tests.service.results import result_of

LENGTHS = [256, 512, 1024]


class TestPerplexity:
    def test_the_best_and_how_far_the_others_reach(self) -> None:
        result = result_of({"default": [6.0, 60.0, 90.0], "a": [6.1, 6.2, 6.3], "b": [6.5, 6.59, 9.0]}, LENGTHS)
        assert result.words() == [
            "At 1,024 tokens, a is best: perplexity 6.300 (95 % interval 5.985 to 6.678).",
            "The model's own encoding has 6.000 (95 % interval 5.700 to 6.360) at 256 tokens. Within 10 % of that "
            "(6.600): a (by 95 % intervals not surely there) up to 1,024 tokens; "
            "b (by 95 % intervals not surely there) up to 512 tokens; default up to 256 tokens.",
        ]

    def test_an_interval_below_the_limit_is_not_doubted(self) -> None:
        result = result_of({"default": [6.0, 60.0], "a": [6.0, 6.0]}, LENGTHS[:2])
        assert result.words()[-1].endswith(": a up to 512 tokens; default up to 256 tokens.")

    @pytest.mark.parametrize(("shift", "is_sure"), [((0.1, 0.1, 0.1, 0.1), True), ((2.0, -1.2, 0.9, -1.3), False)])
    def test_the_interval_of_the_ratio_decides(self, shift: tuple[float, ...], is_sure: bool) -> None:
        """Both methods find the same quarters hard, so their own intervals overlap in either case."""
        result = result_of({"default": [6.0, 90.0], "a": [6.0, 7.0], "b": [6.0, 7.1]}, LENGTHS[:2])
        nll = (50.0, 100.0, 200.0, 130.0)
        _, a, b = (method.lengths[1] for method in result.methods)
        a.groups = [(each, 64) for each in nll for _ in range(2)]
        b.groups = [(each + more, 64) for each, more in zip(nll, shift, strict=True) for _ in range(2)]
        assert a.interval is not None
        assert b.interval is not None
        assert a.interval.high > b.interval.low
        sentence = "By 95 % intervals it is not surely better than b."
        assert result.words()[1:-1] == ([] if is_sure else [sentence])

    def test_other_tokens_are_not_paired(self) -> None:
        """Under ``curve`` a longer length scores other tokens than the reference. Under ``tail`` they are the same."""
        result = result_of({"default": [6.0, 60.0], "a": [6.0, 6.2]}, LENGTHS[:2])
        for method in result.methods:
            for at in method.lengths:
                at.groups = [(at.nll_mean * 64, 64)] * 8
        assert "not surely there" in result.words()[-1]
        result.protocol = "tail"
        assert "not surely there" not in result.words()[-1]

    def test_near_at_longer_lengths_only(self) -> None:
        result = result_of({"default": [6.0, 90.0, 90.0], "a": [9.0, 6.0, 6.0], "b": [9.0, 9.0, 9.0]}, LENGTHS)
        told = result.words()[-1].partition(": ")[2]
        assert told == "a at 512 and 1,024 tokens; default up to 256 tokens; b at no length from there on."

    def test_without_the_models_own_encoding_there_is_no_reference(self) -> None:
        result = result_of({"a": [6.0, 7.0]}, LENGTHS[:2], kind=None)
        assert result.words() == [
            "At 512 tokens, the perplexity of a is 7.000.",
            "The model's own encoding has no value within its trained 256 tokens: there is nothing to compare with.",
        ]

    def test_another_model_is_no_reference(self) -> None:
        result = result_of({"default": [6.0, 7.0]}, LENGTHS[:2], models={"default": "other"})
        assert "has no value" in result.words()[-1]

    def test_the_own_encoding_with_a_temperature_is_another_one(self) -> None:
        result = result_of({"default(attention_temperature=1.1)": [6.0, 7.0]}, LENGTHS[:2])
        result.methods[0].pe["requested"] = "default"
        assert "has no value" in result.words()[-1]

    def test_the_reference_is_at_the_longest_length_within_training(self) -> None:
        result = result_of({"default": [9.0, 8.0, 7.0]}, LENGTHS, trained_length=600)
        assert "at 512 tokens. Within 10 % of that (8.800)" in result.words()[-1]

    def test_ties(self) -> None:
        result = result_of({"default": [6.0], "a": [6.0]}, [256], kind=None)
        assert result.words()[0] == "At 256 tokens, default and a are equally good: perplexity 6.000."

    def test_rounding_makes_no_best(self) -> None:
        result = result_of({"default": [6.0], "a": [6.0 * (1 + 1e-7)], "b": [6.0001]}, [256], kind=None)
        assert result.words()[0] == "At 256 tokens, default and a are equally good: perplexity 6.000."

    def test_of_many_only_the_first_are_listed(self) -> None:
        result = result_of({"default": [6.0], **{f"m{n}": [6.0] for n in range(9)}}, [256], kind=None)
        assert "default, m0, m1, m2, m3 and 5 more are equally good" in result.words()[0]


class TestOthers:
    def test_passkey_reaches_as_far_as_half_is_found_everywhere(self) -> None:
        result = examples.passkey()
        result.methods[3].lengths[1].score = 0.4  # a dip ends the reach
        assert result.words()[-1] == (
            "Found at least 50 % of the time, there and at every shorter length: alibi up to 1,024 tokens; "
            "yarn(factor=8) up to 512 tokens; default and linear(factor=4) up to 256 tokens."
        )

    def test_nothing_found_is_no_victory(self) -> None:
        result = examples.passkey()
        for method in result.methods:
            method.lengths[-1].score = 0.0
            method.lengths[-1].interval = Interval(low=0.0, high=0.161, kind="samples")
        assert result.words()[0] == (
            "At 2,048 tokens, every method fails: share found 0 % (95 % interval 0 % to 16.1 %)."
        )

    def test_ruler_says_the_effective_lengths(self) -> None:
        assert examples.ruler().words()[-1] == (
            "Effective length, above 85.6 %: linear(factor=4) up to 1,024 tokens; alibi up to 512 tokens; "
            "yarn(factor=8) up to 256 tokens; default at no length."
        )

    def test_probe_sums_the_attention_past_the_trained_length(self) -> None:
        result = examples.probe(["default"])
        copying, attention = result.words()
        assert copying.startswith("At a distance of 512 tokens, the copying accuracy of default is 33.6 %")
        far = sum(bucket.mass for bucket in result.methods[0].attention_mean[0].buckets[-2:])
        assert attention.endswith(f"or more: default {100 * far:.3g} % (on the first 4 keys 10 %).")

    def test_probe_counts_whole_buckets_past_the_trained_length(self) -> None:
        result = examples.probe(["default"])
        result.trained_length = 300  # inside the bucket from 256 to 512
        attention = result.words()[-1]
        far = result.methods[0].attention_mean[0].buckets[-1].mass
        assert f"at distances of 512 tokens or more: default {100 * far:.3g} %" in attention

    def test_probe_within_the_trained_length_says_nothing_of_it(self) -> None:
        result = examples.probe()
        result.trained_length = 1024
        assert not any("attention" in sentence for sentence in result.words())

    def test_long_perplexity_without_a_key_token(self) -> None:
        result = examples.long_perplexity()
        for method in result.methods:
            for at in method.lengths:
                at.long_perplexity = None
        assert result.words() == ["Nothing could be measured: no scored token needs long context."]

    def test_long_perplexity_warns_of_few_key_tokens(self) -> None:
        result = examples.long_perplexity()
        at_512 = [at for method in result.methods for at in method.lengths if at.length == 512]
        for count, says in ((29, "256 and 512 tokens (0 to 29; 30 are"), (30, "256 tokens (0; 30 are")):
            for at in at_512:
                at.key_tokens = count
            caution = f"Key tokens are too few at {says} the least): these numbers mean little."
            assert result.words()[-1] == caution
            assert str(table_of(result, 80).caption).endswith(f"; {caution}")
            sweep = examples.sweep()
            assert sweep.cautions() == []
            sweep.evaluations.append(result)
            assert sweep.words()[-1] == caution

    def test_a_sweep_speaks_for_itself(self) -> None:
        result = examples.sweep()
        result.methods[1].adequate = result.methods[2].adequate = True
        assert result.words() == [
            result.answer.words,
            "Good enough by every evaluation: yarn(factor=8) and alibi.",
        ]

    @pytest.mark.parametrize("evaluation", examples.EVERY)
    def test_every_evaluation_has_words(self, evaluation: str) -> None:
        assert all(sentence.endswith(".") for sentence in examples.EVERY[evaluation]().words())


class TestByRatio:
    """Readers see the intervals of single perplexities: a note says where verdicts go by another one."""

    NOTE = "Perplexities are compared by the interval of their ratio, which is usually narrower"

    def shown(self, result: EvaluationResult, picture: int = 0) -> list[bool]:
        texts = str(table_of(result, 200).caption), pictures_of(result)[picture].caption, report_of(result)
        return [self.NOTE in text for text in texts]

    def test_tables_figures_and_reports_of_perplexities_name_it(self) -> None:
        curves = {"default": [6.0, 60.0, 90.0], "a": [6.1, 6.2, 6.3]}
        assert self.shown(result_of(curves, LENGTHS)) == [True] * 3

    @pytest.mark.parametrize("kind", [None, "other tokens", "one method"])
    def test_nothing_else_has_it(self, kind: str | None) -> None:
        curves = {"default": [6.0, 60.0], "a": [6.1, 6.2]}
        result = result_of(curves if kind != "one method" else {"a": [6.1, 6.2]}, LENGTHS[:2])
        for method in result.methods:
            for at in method.lengths:
                at.interval = at.interval if kind else None
                at.groups = at.groups if kind != "other tokens" or method.label == "a" else [(60.0, 30)] * 8
        assert self.shown(result) == [False] * 3
        assert self.shown(examples.ruler()) == [False] * 3

    def test_a_hidden_interval_needs_no_note(self) -> None:
        assert self.NOTE not in str(table_of(result_of({"default": [6.0], "a": [6.1]}, [256]), 20).caption)

    @pytest.mark.parametrize("by_ratio", [True, False])
    def test_a_sweep_explains_its_question_marks(self, by_ratio: bool) -> None:
        result = examples.sweep()
        judgements = [at for method in result.methods for at in method.judgements if at.evaluation == 0]
        for at in judgements:
            at.by_ratio, at.sure = by_ratio, True
        doubt = f'{self.NOTE}; "?": it does not decide' if by_ratio else '"?": 95 % intervals do not decide'
        for is_sure in (True, False):
            judgements[0].sure = result.methods[0].sure = is_sure
            for text in (str(table_of(result, 80).caption), pictures_of(result)[0].caption):
                assert (self.NOTE in text) is by_ratio
                assert ('"?"' in text) is not is_sure
                assert is_sure or doubt in text
        assert self.NOTE not in pictures_of(result)[1].caption, "shares have no ratio"


@pytest.mark.parametrize("evaluation", examples.EVERY)
class TestPartial:
    """Whatever a partial result says or draws names its scope. A whole one has none."""

    def test_words_and_heading_begin_with_the_scope(self, evaluation: str) -> None:
        whole, part = examples.EVERY[evaluation](), partial_of(evaluation)
        first, *others = whole.words()
        assert part.words() == [f"Of the methods that finished: {first}", *others]
        assert part.heading() == f"Of the methods that finished: {whole.heading()}"

    def test_every_picture_has_it_above(self, evaluation: str) -> None:
        drawn = pictures_of(partial_of(evaluation))
        assert all("of the methods that finished · " in picture.subtitle for picture in drawn)
        assert not any("finished" in picture.subtitle for picture in examples.pictures(evaluation))

    def test_a_report_has_it_in_title_answer_and_tables(self, evaluation: str) -> None:
        page = report_of(partial_of(evaluation))
        assert f"<title>{evaluation.replace('_', ' ').capitalize()}: tiny (partial)</title>" in page
        assert "<p>Of the methods that finished: " in page
        captions = re.findall(r'<h3 id="table-\d+">(.*?)</h3>', page)
        assert captions
        lead, end = "Of the methods that finished: ", "is better), of the methods that finished"
        assert all(caption.startswith(lead) or caption.endswith(end) for caption in captions)
        assert "(partial)" not in examples.report(evaluation)


def partial_of(evaluation: str, *lacks: Part) -> EvaluationResult:
    result: EvaluationResult = examples.EVERY[evaluation]()
    result.end_early(Partial(units_done=4, units_total=6, missing={"ntk": 2}, lacks=[*(lacks or ("methods",))]))
    return result


@pytest.mark.parametrize("evaluation", ["sweep", "recommend", "search"])
def test_the_json_of_an_answer_begins_with_the_scope_once(evaluation: str) -> None:
    part = partial_of(evaluation, "rounds")
    words = part.numbers()["answer"]["words"]
    first = words if evaluation == "sweep" else words[0]
    assert first.startswith("By the rounds that finished: ")
    assert first == part.words()[0] == part.heading()
    of_an_earlier_version = part.model_copy(deep=True, update={"answer": examples.EVERY[evaluation]().answer})
    assert of_an_earlier_version.words() == part.words()


def test_a_partial_result_names_what_it_lacks() -> None:
    lead = [partial_of("sweep", *lacks).words()[0].partition(":")[0] for lacks in SCOPES]
    assert lead == list(SCOPES.values())
    nothing = partial_of("perplexity")
    assert nothing.partial is not None
    nothing.partial.lacks = []
    assert nothing.words() == examples.perplexity().words()


SCOPES: dict[tuple[Part, ...], str] = {
    ("methods",): "Of the methods that finished",
    ("lengths",): "At the lengths that finished",
    ("evaluations",): "By the evaluations that finished",
    ("methods", "evaluations"): "Of the methods and by the evaluations that finished",
    ("rounds",): "By the rounds that finished",
}


class TestTerminal:
    def test_what_is_left_out_is_counted_and_other_models_are_named(self) -> None:
        result = examples.passkey(["default", "alibi"])
        for method in result.methods:
            first = method.lengths[0]
            method.lengths = [first.model_copy(update={"length": 64 * n}) for n in range(1, 31)]
        result.methods[1].model = "other"
        table = table_of(result, 80)
        shown = [str(column.header) for column in table.columns][1:]
        assert len(shown) <= 8
        assert str(table.caption).endswith(f"; {30 - len(shown)} more measured")
        assert [str(cell) for cell in table.columns[0].cells] == ["default", "alibi on other"]

    def test_shares_have_their_intervals(self) -> None:
        result = examples.passkey(["default"])
        at = result.methods[0].lengths[0]
        cell = str(next(iter(table_of(result, 200).columns[1].cells)))
        assert cell == f"{at.score:.2f}\n[{at.interval.low:.3g}, {at.interval.high:.3g}]"
        assert "below: 95 % interval" in str(table_of(result, 200).caption)

    def test_equally_good_methods_are_all_marked(self) -> None:
        result = examples.sweep()
        for method, rank in zip(result.methods, (1, 3, 1, 4), strict=True):
            method.rank = rank
        table = table_of(result, 80)
        styles = [str(cell.style) for cell in table.columns[0].cells if isinstance(cell, Text)]
        assert styles == ["bold green", "bold green", "", ""]
