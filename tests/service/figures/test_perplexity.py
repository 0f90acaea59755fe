"""Pictures: what is drawn is what was measured, whatever the shape of the result."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from patches import parse
from service.evaluation.perplexity.results import PerplexityResult
from service.figures.drawing.style import apart, line_style, tick_text, value_ticks
from service.figures.encodings.frequencies import frequency_figure, frequency_png
from service.figures.encodings.samples import GEOMETRY
from service.figures.evaluations.perplexity import perplexity_figure, perplexity_html, perplexity_png
from tests.service.figures.examples import figures_of
from tests.service.results import result_of

DOUBLING = [256, 512, 1024, 2048]
USUAL = result_of(
    {"default": [6.5, 90.0, 300.0, 400.0], "yarn(factor=8)": [6.9, 7.0, 7.2, 7.6], "alibi": [6.7, 6.6, 6.5, 6.5]},
    DOUBLING,
    models={"alibi": "tiny-alibi"},
)
SHAPES = {
    "usual": USUAL,
    "one point": result_of({"default": [6.5]}, [512], kind=None),
    "one point with an interval": result_of({"default": [6.5], "ntk": [7.0]}, [512]),
    "one method, 256 lengths": result_of({"default": [6 + n for n in range(256)]}, list(range(256, 65537, 256))),
    "20 methods": result_of({f"yarn(factor={n})": [6 + n, 7 + n] for n in range(20)}, [256, 512], kind="documents"),
    "64 methods": result_of({f"yarn(factor={n})": [6 + n, 7 + n] for n in range(64)}, [256, 512]),
    "blow-up": result_of({"default": [6.5, 1e5], "yarn": [6.5, 6.6], "ntk": [6.4, 6.5]}, [256, 512]),
    "ceiling": result_of({"default": [6.5, 1e304]}, [256, 512]),
    "equal values": result_of({"default": [6.5, 6.5]}, [256, 512], kind=None),
    "trained far longer": result_of({"default": [7.0, 6.5]}, [256, 512], trained_length=131072),
    "trained far shorter": result_of({"default": [7.0, 6.5]}, [65536, 131072], trained_length=256),
    "uneven lengths": result_of({"default": [7.0] * 5}, [100, 101, 102, 4000, 4001]),
    "odd names": result_of({"$\\frac{": [7.0], "<b>漢字\n\x00": [7.1]}, [256], documents=["$x$ $\\", "日本語.txt"]),
    "long names": result_of({"x" * 1000: [7.0]}, [256], documents=["y" * 1000]),
}
ANY_SHAPE = pytest.mark.parametrize("result", SHAPES.values(), ids=SHAPES.keys())


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]


def curves(figure: Figure, result: PerplexityResult) -> list[tuple[list[float], list[float]]]:
    """The data of each method's line, in order."""
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == len(result.lengths)]
    found = [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in lines]
    return [line for line in found if line[0] == result.lengths]


class TestPng:
    @ANY_SHAPE
    def test_draws_any_shape(self, result: PerplexityResult) -> None:
        image = imread(io.BytesIO(perplexity_png(result)))
        assert image.shape[0] >= 700
        assert 1000 < image.shape[1] < 2200

    @pytest.mark.parametrize("name", ["usual", "20 methods", "blow-up"])
    def test_lines_are_the_measured_numbers(self, name: str) -> None:
        result = SHAPES[name]
        expected = [(result.lengths, [at.perplexity for at in method.lengths]) for method in result.methods]
        assert [line for line in curves(perplexity_figure(result), result) if line in expected] == expected

    def test_axes_are_logarithmic_with_token_counts_as_ticks(self) -> None:
        axes = perplexity_figure(USUAL).axes[0]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xticks().tolist() == DOUBLING
        assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512", "1,024", "2,048"]

    def test_marks_the_trained_length(self) -> None:
        figure = perplexity_figure(USUAL)
        assert "trained length 256" in texts(figure)
        assert [256, 256] in [list(line.get_xdata()) for line in figure.axes[0].get_lines()]

    @pytest.mark.parametrize(
        ("name", "note"), [("longer", "trained length 131,072 →"), ("shorter", "← trained length 256")]
    )
    def test_points_to_a_trained_length_outside(self, name: str, note: str) -> None:
        figure = perplexity_figure(SHAPES[f"trained far {name}"])
        assert note in texts(figure)

    def test_says_what_it_shows(self) -> None:
        shown = texts(perplexity_figure(USUAL))
        title = " ".join(shown)
        for part in ("tiny", "curve protocol", "python-reference", "5,000 tokens", "blocks of 64 tokens"):
            assert part in title
        for label in ("default", "yarn(factor=8)", "alibi on tiny-alibi", "400.0", "7.600", "6.500"):
            assert label in shown

    @ANY_SHAPE
    def test_labels_do_not_overlap(self, result: PerplexityResult) -> None:
        figure = perplexity_figure(result)
        names = [text for text in figure.axes[0].texts if text.get_ha() == "left" and text.get_va() == "center"]
        assert len(names) == len(result.methods)
        boxes = sorted((text.get_window_extent() for text in names), key=lambda box: float(box.y0))
        assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))
        assert all(box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)

    def test_a_blow_up_does_not_flatten_the_other_lines(self) -> None:
        figure = perplexity_figure(SHAPES["blow-up"])
        assert figure.axes[0].get_ylim()[1] < 1000
        assert any("beyond the axis" in text for text in texts(figure))
        assert "100,000" in texts(figure)

    def test_a_blow_up_alone_is_shown_in_full(self) -> None:
        figure = perplexity_figure(result_of({"default": [6.5, 1e5]}, [256, 512]))
        assert figure.axes[0].get_ylim()[1] > 1e5

    def test_threads_draw_the_same_picture(self) -> None:
        expected = perplexity_png(USUAL)
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: perplexity_png(USUAL), range(8))) == {expected}

    def test_never_imports_pyplot(self) -> None:
        code = "import service.figures.encodings.frequencies, sys; print(sorted(sys.modules))"
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "'matplotlib.figure'" in printed.stdout
        assert "'matplotlib.pyplot'" not in printed.stdout


class TestHtml:
    def data(self, result: PerplexityResult) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        figure = figures_of(perplexity_html(result))["perplexity"]
        return figure["data"], figure["wide"]

    @ANY_SHAPE
    def test_loads_nothing_from_elsewhere(self, result: PerplexityResult) -> None:
        page = perplexity_html(result)
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)
        assert [tag for tag in tags if "src=" in tag or "href=" in tag] == []
        assert "plotly.js v" in page

    def test_has_the_measured_numbers(self) -> None:
        traces, layout = self.data(USUAL)
        lines = [trace for trace in traces if trace["mode"] == "lines+markers"]
        assert [line["name"] for line in lines] == ["default", "yarn(factor=8)", "alibi on tiny-alibi"]
        for line, method in zip(lines, USUAL.methods, strict=True):
            assert line["x"] == DOUBLING
            assert line["y"] == [at.perplexity for at in method.lengths]
        assert (layout["xaxis"]["type"], layout["yaxis"]["type"]) == ("log", "log")
        assert layout["xaxis"]["ticktext"] == ["256", "512", "1,024", "2,048"]
        assert layout["shapes"][0]["x0"] == 256

    def test_names_cannot_run_scripts(self) -> None:
        attack = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
        result = result_of({attack: [7.0]}, [256], documents=[attack])
        result.model = attack
        page = perplexity_html(result)
        assert "<script>alert" not in page
        assert "<img src=x" not in page


class TestFrequencies:
    def pairs(self, factor: float | None = 8.0, before: bool = True) -> list[dict[str, Any]]:
        waves = [2 * np.pi * 10000 ** (i / 32) for i in range(32)]
        return [
            {"pair": i, "wavelength_before": wave if before else None, "wavelength_after": factor and wave * factor}
            for i, wave in enumerate(waves)
        ]

    def test_draws_both_lines_and_their_ratio(self) -> None:
        upper, lower = frequency_figure(self.pairs(), 256, "linear").axes
        before, after = upper.get_lines()[:2]
        assert np.allclose(np.asarray(after.get_ydata()) / np.asarray(before.get_ydata()), 8.0)
        assert np.allclose(lower.get_lines()[0].get_ydata(), 8.0)
        assert 256 in [line.get_ydata()[0] for line in upper.get_lines()]

    @pytest.mark.parametrize(
        ("factor", "before", "note"),
        [
            (None, True, "this encoding rotates nothing"),
            (None, False, "this encoding rotates nothing"),
            (1.0, False, "the checkpoint rotates nothing"),
        ],
    )
    def test_says_when_nothing_rotates(self, factor: float | None, before: bool, note: str) -> None:
        assert note in texts(frequency_figure(self.pairs(factor, before), 256, "none"))

    def test_pairs_that_do_not_rotate_leave_a_gap(self) -> None:
        pairs = self.pairs()
        for row in pairs[24:]:
            row["wavelength_after"] = None
        figure = frequency_figure(pairs, 256, "proportional")
        upper, lower = figure.axes
        before, after = (np.asarray(line.get_ydata()) for line in upper.get_lines()[:2])
        assert not np.isnan(before).any()
        assert np.isnan(after).tolist() == [False] * 24 + [True] * 8
        assert np.isnan(lower.get_lines()[0].get_ydata()).tolist() == [False] * 24 + [True] * 8
        assert "8 of 32 pairs do not rotate" in texts(figure)
        assert not any("rotates nothing" in text for text in texts(figure))

    @pytest.mark.parametrize(
        ("fields", "label", "last"),
        [
            ({"method": "rerope", "window": 64}, "effective distance", 64),
            ({"method": "streaming"}, "effective distance", 255),
            ({"method": "alibi"}, "added, per head", -511.5),
        ],
    )
    def test_shows_distances_and_biases_in_place_of_the_stretch(
        self, fields: dict[str, Any], label: str, last: float
    ) -> None:
        recipe = parse(fields).recipe(GEOMETRY)
        lower = frequency_figure(self.pairs(None), 256, fields["method"], recipe, 256).axes[1]
        assert lower.get_ylabel() == label
        assert last in [np.asarray(line.get_ydata())[at] for line in lower.get_lines() for at in (0, -1)]

    @pytest.mark.parametrize("count", [1, 2, 32])
    def test_draws_any_number_of_pairs(self, count: int) -> None:
        assert imread(io.BytesIO(frequency_png(self.pairs()[:count], 256, "$\\frac{ 漢"))).shape[1] == 1200


def test_140_lines_look_different() -> None:
    assert len({line_style(index) for index in range(140)}) == 140


@given(st.floats(1e-3, 1e6), st.floats(1.001, 1e300), st.integers(4, 12))
@example(999_385.0, 1.015625, 4)
def test_value_ticks_are_few_round_and_inside(low: float, ratio: float, most: int) -> None:
    high = low * ratio
    ticks = value_ticks(low, high, most)
    assert 2 <= len(ticks) <= most + 2
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert len({tick_text(tick) for tick in ticks}) == len(ticks)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.001, 0.02))
def test_labels_are_placed_apart_and_in_order(wanted: list[float], gap: float) -> None:
    placed = apart(wanted, gap)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    assert all(placed[b] - placed[a] >= gap - 1e-9 for a, b in pairwise(order))
    assert min(placed) >= -1e-9
    assert max(placed) <= 1 + 1e-9


def test_labels_with_room_stay_where_they_belong() -> None:
    assert apart([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])
    assert apart([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
