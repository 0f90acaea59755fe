"""Pictures can be read: order, colours, origins, intervals, words where there is nothing to see."""

from __future__ import annotations

import html
from typing import Any

import pytest

from service.evaluation.results import EvaluationResult
from service.evaluation.scores import Interval
from service.evaluation.statistics.separation import BY_RATIO
from service.figures import Picture, pictures_of
from service.figures.drawing.charts import SUBTITLE
from service.figures.results import picture_of
from tests.service.figures import examples
from tests.service.figures.examples import EVERY, pictures
from tests.service.figures.measured import LENGTHS, NAMES
from tests.service.results import result_of


def named(result: EvaluationResult, name: str) -> Picture:
    return next(picture for picture in pictures_of(result) if picture.name == name)


def subtitle(picture: Picture) -> str:
    return html.unescape(picture.figure.layout.title.subtitle.text)


def annotations(picture: Picture) -> list[str]:
    return [note.text for note in picture.figure.layout.annotations]


def shaded(picture: Picture) -> int:
    """Closed shapes in the picture: intervals."""
    return sum(trace.type == "scatter" and trace.fill == "toself" for trace in picture.figure.data)


def colour_of(trace: Any) -> Any:
    return trace.marker.color if trace.type == "bar" else trace.line.color


class TestSweep:
    def test_bars_are_sorted_with_the_best_on_top(self) -> None:
        for picture, values in zip(
            pictures("sweep")[:2], ([7.53, 7.83, 8.13, 400.0], [0.5, 0.3, 0.2, 0.0]), strict=True
        ):
            bars = sorted(picture.figure.data, key=lambda bar: bar.y[0])
            assert [bar.x[0] for bar in bars] == pytest.approx(values)
            assert list(picture.figure.layout.yaxis.range) == [3.5, -0.5], "place 0 is at the top"

    def test_the_winner_is_marked(self) -> None:
        perplexity, share = pictures("sweep")[:2]
        assert [text for text in perplexity.figure.layout.yaxis.ticktext if "★" in text] == ["★ yarn(factor=8)"]
        assert [text for text in share.figure.layout.yaxis.ticktext if "★" in text] == ["★ linear(factor=4)"]
        assert "★ best" in subtitle(perplexity)

    def test_a_question_mark_is_explained_on_the_picture(self) -> None:
        result = examples.sweep()
        for is_sure in (True, False):
            for method in result.methods:
                method.judgements[0].sure = is_sure
            assert ('"?": 95 % intervals do not decide' in subtitle(pictures_of(result)[0])) is not is_sure

    def test_verdicts_that_go_by_the_ratio_are_explained_in_the_line_that_a_png_shows(self) -> None:
        result = examples.sweep()
        for method in result.methods:
            method.judgements[0].by_ratio, method.judgements[0].sure = True, False
        told = subtitle(pictures_of(result)[0])
        assert 'verdicts go by the interval of the ratio; "?": it does not decide' in told
        assert len(told) <= SUBTITLE
        for method in result.methods:
            method.judgements[0].sure, method.judgements[0].limit = True, None
        assert BY_RATIO in subtitle(pictures_of(result)[0]), "there is room for the sentence"

    def test_nobody_wins_where_all_are_equal(self) -> None:
        result = examples.sweep()
        for method in result.methods:
            method.judgements[1].value, method.judgements[1].limit = 0.0, None
        assert subtitle(pictures_of(result)[1]).startswith("nothing was found at this length")
        assert "dotted" not in pictures_of(result)[1].caption
        assert not [text for text in pictures_of(result)[1].figure.layout.yaxis.ticktext if "★" in text]

    def test_a_method_without_a_number_is_last(self) -> None:
        result = examples.sweep()
        result.methods[1].judgements[0].value = None
        bars = pictures_of(result)[0].figure.data
        assert max(bars, key=lambda bar: bar.y[0]).x[0] is None

    def test_bars_begin_at_a_perfect_prediction_or_at_nothing(self) -> None:
        perplexity, share = pictures("sweep")[:2]
        assert perplexity.figure.layout.xaxis.type == "log"
        assert perplexity.figure.layout.xaxis.range[0] == 0.0, "the logarithm of 1"
        assert share.figure.layout.xaxis.range[0] == 0.0
        result = examples.sweep()
        for method, value in zip(result.methods, (7.0, 7.5, 8.0, 9.0), strict=True):
            method.judgements[0].value, method.judgements[0].interval = value, None
        assert pictures_of(result)[0].figure.layout.xaxis.range[0] == 0.0


@pytest.mark.parametrize("evaluation", EVERY)
def test_a_colour_belongs_to_a_method_in_every_figure(evaluation: str) -> None:
    seen: dict[str, set[str]] = {name: set() for name in NAMES}
    for picture in pictures(evaluation):
        for trace in picture.figure.data:
            name = html.unescape(trace.name or "").split(": ")[0]
            if name in seen and (trace.type == "bar" or (trace.type == "scatter" and trace.mode != "none")):
                seen[name].add(str(colour_of(trace)))
    assert all(len(colours) == 1 for colours in seen.values())
    assert len({next(iter(colours)) for colours in seen.values()}) == len(NAMES)


class TestIntervals:
    def test_wide_ones_of_many_lines_are_left_out(self) -> None:
        names = [f"yarn(factor={n})" for n in range(2, 9)]
        result = result_of({name: [40.0 + n, 50, 60, 70] for n, name in enumerate(names)}, LENGTHS)
        for method in result.methods:
            for at in method.lengths:
                assert at.interval
                at.interval.low, at.interval.high = at.perplexity / 1.5, at.perplexity * 1.5
        picture = pictures_of(result)[0]
        assert shaded(picture) == 0
        assert "the CSV file has them" in subtitle(picture)
        assert all("95 % interval" in hover for hover in picture.figure.data[0].customdata)
        result.methods = result.methods[:1]
        assert shaded(pictures_of(result)[0]) == 1

    def test_wide_ones_of_few_lines_are_whiskers_side_by_side(self) -> None:
        result = result_of({f"yarn(factor={n})": [40.0 + n, 50, 60, 70] for n in range(2, 5)}, LENGTHS)
        for method in result.methods:
            for at in method.lengths:
                at.interval = Interval(low=at.perplexity / 1.5, high=at.perplexity * 1.5, kind="documents")
        result.methods[0].lengths[1].interval = None
        picture = pictures_of(result)[0]
        assert shaded(picture) == 0
        assert "would hide" not in subtitle(picture)
        first, second, third = (trace for trace in picture.figure.data if trace.mode == "lines+markers")
        assert list(second.x) == pytest.approx(LENGTHS)
        for x, before, behind in zip(LENGTHS, first.x, third.x, strict=True):
            assert 0.95 * x < before < 0.999 * x < 1.001 * x < behind < 1.05 * x
        assert [text[:5] for text in third.hovertemplate] == ["256: ", "512: ", "1,024", "2,048"]
        assert list(third.error_y.array) == pytest.approx([value / 2 for value in third.y])
        assert list(third.error_y.arrayminus) == pytest.approx([value / 3 for value in third.y])
        assert first.error_y.array[1] is None, "no interval, no whisker"
        longer = result_of({"a": [40.0] * 9, "b": [41.0] * 9}, range(256, 265))
        for method in longer.methods:
            for at in method.lengths:
                at.interval = Interval(low=20, high=80, kind="documents")
        assert "would hide the lines" in subtitle(pictures_of(longer)[0]), "of many lengths"

    @pytest.mark.parametrize(("low", "high", "leave"), [(4, 50, True), (25, 900, True), (25, 60, False)])
    def test_those_that_leave_the_axis_are_noted(self, low: float, high: float, leave: bool) -> None:
        result = result_of({"a": [40.0] * 4, "b": [42.0] * 4}, LENGTHS)
        for method in result.methods:
            for at in method.lengths:
                at.interval = Interval(low=low, high=high, kind="documents")
        assert subtitle(pictures_of(result)[0]).count("intervals leave the picture") == leave

    def test_those_of_a_line_above_the_axis_are_not(self) -> None:
        result = result_of({"a": [40.0] * 4, "b": [42.0] * 4, "c": [1e6] * 4}, LENGTHS)
        for method in result.methods:
            for at in method.lengths:
                at.interval = Interval(low=0.9 * at.perplexity, high=1.1 * at.perplexity, kind="documents")
        text = subtitle(pictures_of(result)[0])
        assert "lines that leave the picture" in text
        assert "intervals leave" not in text

    def test_a_ruler_without_a_find_says_so(self) -> None:
        result = examples.ruler()
        assert "nothing was found" not in subtitle(pictures_of(result)[0])
        for method in result.methods:
            for at in method.lengths:
                at.score = 0.0
        assert subtitle(pictures_of(result)[0]).startswith("nothing was found at any length")

    def test_narrow_ones_of_many_lines_are_drawn(self) -> None:
        result = result_of({f"m{n}": [10.0 * 2**n] * 4 for n in range(7)}, LENGTHS)
        assert shaded(pictures_of(result)[0]) == 7

    def test_wide_ones_of_shares_are_left_out_too(self) -> None:
        assert shaded(named(examples.passkey(), "retrieval-by-length")) == 0
        assert shaded(named(examples.passkey(NAMES[:1]), "retrieval-by-length")) == 1


class TestTitles:
    @pytest.mark.parametrize("evaluation", EVERY)
    def test_name_what_is_measured_by_what_or_at_which_length(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            if picture.name != "effective-length":
                assert any(word in picture.title for word in (" by ", " at ", "tokens")), picture.title

    def test_a_loss_by_position_names_the_length_of_its_passes(self) -> None:
        assert pictures_of(examples.perplexity())[1].title == "NLL by position in passes of 2,048 tokens: tiny"


class TestNothingFound:
    def nothing(self, evaluation: str) -> Any:
        result: Any = EVERY[evaluation]()
        for method in result.methods:
            for at in [*getattr(method, "cells", []), *getattr(method, "tasks", []), *method.lengths]:
                at.score = 0.0
        return result

    @pytest.mark.parametrize("evaluation", ["passkey", "ruler"])
    def test_the_likelihood_of_the_answer_is_shown_in_place_of_zeros(self, evaluation: str) -> None:
        result = self.nothing(evaluation)
        for picture in pictures_of(result):
            maps = [trace for trace in picture.figure.data if trace.type == "heatmap"]
            assert all(any(value for row in shown.z for value in row) for shown in maps), picture.title
        first = next(picture for picture in pictures_of(result) if picture.figure.data[0].type == "heatmap")
        assert "answer" in first.title
        assert subtitle(first).startswith("nothing was found at any length")
        assert first.figure.data[0].z[0][0] == pytest.approx(
            result.methods[0].cells[0].answer_nll if evaluation == "passkey" else result.methods[0].tasks[0].answer_nll
        )

    def test_by_length_the_likelihood_too(self) -> None:
        result = self.nothing("passkey")
        lines = [trace for trace in named(result, "answer-nll-by-length").figure.data if trace.mode != "none"]
        assert [list(line.y) for line in lines] == [[at.answer_nll for at in m.lengths] for m in result.methods]
        assert "retrieval" not in {picture.name for picture in pictures_of(result)}

    def test_the_first_picture_as_png_is_that(self) -> None:
        result = self.nothing("passkey")
        assert picture_of(result).png() == named(result, "answer-nll").png()

    def test_without_a_key_token_the_perplexity_of_all_says_why_it_is_shown(self) -> None:
        result = examples.long_perplexity()
        assert "needs long context" not in subtitle(pictures_of(result)[0])
        for method in result.methods:
            for at in method.lengths:
                at.long_perplexity, at.key_tokens = None, 0
        (only,) = pictures_of(result)
        assert subtitle(only).startswith("no scored token needs long context: shown is the perplexity over all")


class TestProbe:
    def test_labels_have_units_and_percent(self) -> None:
        layout = pictures("probe")[0].figure.layout
        assert layout.xaxis4.title.text == "distance from query to key, tokens"
        assert layout.yaxis.title.text == "share of attention"
        assert layout.yaxis.ticktext[0] == "0 %"
        assert all(text.endswith(" %") for text in layout.yaxis.ticktext)

    def test_heads_of_a_method_are_one_trace_with_gaps(self) -> None:
        result = examples.probe()
        traces = pictures_of(result)[0].figure.data
        faint = [trace for trace in traces if trace.opacity != 1.0]
        assert len(faint) == len(NAMES)
        buckets = [[bucket.mass for bucket in head.buckets] for head in result.methods[0].attention]
        drawn: list[list[float]] = [[]]
        for value in faint[0].y:
            drawn.append([]) if value is None else drawn[-1].append(value)
        assert [line for line in drawn if line] == buckets


class TestOnePoint:
    def test_one_range_of_positions_has_no_picture(self) -> None:
        result = examples.perplexity()
        for method in result.methods:
            method.nll_by_position = method.nll_by_position[-1:]
        assert [picture.name for picture in pictures_of(result)] == ["perplexity", "change"]

    def test_a_point_says_why_it_is_alone(self) -> None:
        result = result_of({"default": [6.5], "ntk": [7.0]}, [512])
        assert "one length was measured: a point and no line" in subtitle(pictures_of(result)[0])

    def test_points_at_one_length_lie_side_by_side(self) -> None:
        result = result_of({"default": [6.5], "ntk": [6.6], "yarn": [6.7]}, [512])
        points = [trace for trace in pictures_of(result)[0].figure.data if trace.mode == "lines+markers"]
        first, second, third = (point.x[0] for point in points)
        assert second == pytest.approx(512)
        assert first < 507 < 517 < third, "no interval hides another"
        assert all(point.hovertemplate[0].startswith("512: ") for point in points)

    def test_a_line_says_nothing_of_the_kind(self) -> None:
        assert "a point and no line" not in subtitle(pictures("perplexity")[0])

    def test_key_tokens_at_one_length_only(self) -> None:
        result = examples.long_perplexity()
        for method in result.methods:
            for at in method.lengths[:-1]:
                at.long_perplexity = None
        first, second, *_ = pictures_of(result)
        assert subtitle(first).startswith("there are key tokens at one length only: a point and no line")
        assert "a point and no line" not in subtitle(second)
