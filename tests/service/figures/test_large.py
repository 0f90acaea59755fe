"""Pictures of large results have no more points than a screen can show, and say so."""

from __future__ import annotations

import html
import math
import random
from collections.abc import Callable

import pytest

from service.evaluation.results import EvaluationResult
from service.evaluation.retrieval.results import DepthMethod, DepthScore, LengthScore, PasskeyResult
from service.evaluation.statistics.proportion import wilson
from service.figures import pictures_of
from service.figures.drawing.axes import linear_axis, spread
from service.figures.drawing.charts import new_figure
from service.figures.drawing.curves import MOST_POINTS, Curve, add_curves, thinned
from service.figures.drawing.panels import MOST_CELLS, cells_drawn
from service.figures.evaluations import perplexity, retrieval
from service.figures.evaluations.probe import MOST_HEADS, MOST_LENGTHS
from service.figures.results import html_of, picture_of
from tests.service.figures import examples

MANY = 100_000


def wave(points: int) -> Curve:
    noise = random.Random(0)
    y = [math.sin(at / 5000) + noise.random() for at in range(points)]
    return Curve("a", range(points), y, [value - 1 for value in y], [value + 1 for value in y])


class TestLines:
    def test_a_hundred_thousand_points_are_thinned_and_the_subtitle_says_so(self) -> None:
        figure = new_figure("", "what")
        figure.update_layout(yaxis=linear_axis("", -2, 4))
        curve = wave(MANY)
        add_curves(figure, [curve])
        band, line = figure.data
        assert 1000 < len(line.x) <= MOST_POINTS
        assert len(band.x) == 2 * len(line.x)
        assert html.unescape(figure.layout.title.subtitle.text) == f"{len(line.x):,} of 100,000 points are drawn · what"
        assert (line.x[0], line.x[-1]) == (0, MANY - 1)
        assert (max(line.y), min(line.y)) == (max(curve.y), min(curve.y)), "no peak is lost"

    def test_many_lines_share_the_points(self) -> None:
        figure = new_figure("", "")
        figure.update_layout(yaxis=linear_axis("", -2, 4))
        add_curves(figure, [wave(MANY // 10)] * 64)
        assert sum(len(line.x) for line in figure.data if line.mode != "none") <= MOST_POINTS

    @pytest.mark.parametrize("most", [4, 5, 100, 9_999])
    def test_points_are_some_of_those_measured_in_order(self, most: int) -> None:
        curve = wave(10_000)
        few = thinned(curve, most)
        assert most / 2 - 2 <= len(few.x) <= most
        assert list(few.x) == sorted(set(few.x))
        assert [curve.y[int(at)] for at in few.x] == list(few.y)

    def test_few_points_stay_as_they_are(self) -> None:
        curve = wave(256)
        assert thinned(curve, 312) is curve

    def test_gaps_are_no_peaks(self) -> None:
        curve = Curve("a", range(100), [None if at % 2 else float(at) for at in range(100)])
        assert None not in thinned(curve, 20).y[:-1]


class TestHeatMaps:
    def test_a_hundred_thousand_cells_are_thinned_and_the_subtitle_says_so(self) -> None:
        lengths, depths = list(range(256, 256 * 1001, 256)), [step / 100 for step in range(101)]
        interval = wilson(1, 2)
        measured = {"samples": 2, "score": 0.5, "interval": interval, "answer_nll": 1.0, "answer_accuracy": 0.5}
        cells = [DepthScore(**measured, length=n, depth=d, outputs=[]) for n in lengths for d in depths]
        result = PasskeyResult(
            model="tiny",
            trained_length=256,
            lengths=lengths,
            depths=depths,
            samples=2,
            seed=0,
            max_new_tokens=10,
            bos=False,
            documents=[],
            methods=[
                DepthMethod(
                    label="default",
                    pe={},
                    model="tiny",
                    cells=cells,
                    lengths=[LengthScore(**measured, length=n) for n in lengths],
                )
            ],
            digits=5,
        )
        picture = pictures_of(result)[0]
        (shown,) = picture.figure.data
        drawn = len(shown.z) * len(shown.z[0])
        assert MOST_CELLS / 2 < drawn <= MOST_CELLS
        assert picture.figure.layout.title.subtitle.text.startswith(f"{drawn:,} of 101,000 cells are drawn")
        assert len([text for text in picture.figure.layout.xaxis.ticktext if text]) <= 8
        assert picture.figure.layout.xaxis.ticktext[-1] == "256,000"
        assert len(picture.rows) == 101_000, "the numbers are all there"

    @pytest.mark.parametrize(("columns", "lines", "panels"), [(1000, 101, 1), (256, 11, 64), (256, 101, 64), (9, 9, 1)])
    def test_a_figure_has_so_many_cells_at_most(self, columns: int, lines: int, panels: int) -> None:
        shown = cells_drawn(range(columns), range(lines), panels)
        assert len(shown[0]) * len(shown[1]) * panels <= max(MOST_CELLS, 16 * panels)
        for drawn, measured in zip(shown, (columns, lines), strict=True):
            assert (drawn[0], drawn[-1]) == (0, measured - 1)
            assert drawn == sorted(set(drawn))
        assert columns > 9 or shown == (list(range(9)), list(range(9)))

    def test_steps_are_equal(self) -> None:
        assert spread([0, 1, 2, 3, 4, 5, 6, 7, 8], 3) == [0, 4, 8]


class TestProbe:
    def test_heads_and_lengths_are_bounded(self) -> None:
        result = examples.probe(["default"])
        (method,) = result.methods
        heads = [head.model_copy(update={"layer": layer}) for layer in range(250) for head in method.attention]
        result.lengths = list(range(64, 64 * 101, 64))
        method.attention = [head.model_copy(update={"length": 6400}) for head in heads]
        method.attention_mean = [method.attention_mean[0].model_copy(update={"length": n}) for n in result.lengths]
        method.attention += [heads[0].model_copy(update={"length": n}) for n in result.lengths[:-1]]
        drawn = [picture for picture in pictures_of(result) if picture.name.startswith("attention")]
        assert len(drawn) == MOST_LENGTHS
        assert drawn[0].name == "attention-6400"
        subtitle = drawn[0].figure.layout.title.subtitle.text
        assert subtitle.startswith(
            f"pictures are of {MOST_LENGTHS} of 100 lengths · {MOST_HEADS} of 1,000 heads are drawn"
        )
        faint = next(trace for trace in drawn[0].figure.data if trace.opacity != 1.0)
        assert sum(value is None for value in faint.y) == MOST_HEADS


@pytest.mark.parametrize("draw", [lambda result: picture_of(result).png(), html_of], ids=["png", "html"])
def test_the_first_picture_is_drawn_without_the_others(
    draw: Callable[[EvaluationResult], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = examples.sweep()
    expected = draw(result)
    monkeypatch.setattr(perplexity, "perplexity_picture", None)
    monkeypatch.setattr(retrieval, "depth_picture", None)
    assert draw(result) == expected
