"""The picture of perplexity shows the measured numbers, for results of any shape."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.image import imread
from matplotlib.text import Text

from service.evaluation.perplexity.results import PerplexityResult
from service.figures.drawing.raster import raster
from service.figures.drawing.style import TIMES, line_style, tick_text, value_ticks
from service.figures.evaluations.perplexity import perplexity_picture
from service.figures.web.page import plot_page
from tests.service.figures.examples import figures_of
from tests.service.figures.test_raster import data_lines
from tests.service.results import result_of

DOUBLING = [256, 512, 1024, 2048]
TICKS = [f"{length:,}<br>{length // 256}{TIMES}" for length in DOUBLING]
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


def texts(result: PerplexityResult) -> list[str]:
    drawn = raster(perplexity_picture(result).figure)
    return [text.get_text() for text in drawn.findobj(Text) if isinstance(text, Text) and text.get_visible()]


class TestPng:
    @ANY_SHAPE
    def test_draws_any_shape(self, result: PerplexityResult) -> None:
        image = imread(io.BytesIO(perplexity_picture(result).png()))
        assert image.shape[0] >= 700
        assert image.shape[1] == 1500

    @pytest.mark.parametrize("name", ["usual", "20 methods", "blow-up"])
    def test_lines_are_the_measured_numbers(self, name: str) -> None:
        result = SHAPES[name]
        (axes,) = raster(perplexity_picture(result).figure).axes
        assert data_lines(axes) == [
            (result.lengths, [at.perplexity for at in method.lengths]) for method in result.methods
        ]

    def test_ticks_are_token_counts_and_multiples_of_the_trained_length(self) -> None:
        (axes,) = raster(perplexity_picture(USUAL).figure).axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xticks().tolist() == DOUBLING
        assert [label.get_text() for label in axes.get_xticklabels()] == [text.replace("<br>", "\n") for text in TICKS]

    @pytest.mark.parametrize(
        ("name", "note"),
        [
            ("usual", "trained length 256"),
            ("trained far longer", "trained length 131,072 →"),
            ("trained far shorter", "← trained length 256"),
        ],
    )
    def test_names_the_trained_length_or_points_to_it(self, name: str, note: str) -> None:
        assert note in texts(SHAPES[name])

    @pytest.mark.parametrize("without", [[0], [3], [1], [0, 2], [0, 1, 2, 3]])
    def test_no_interval_is_no_shade(self, without: list[int]) -> None:
        lengths = [
            at.model_copy(update={"interval": None}) if place in without else at
            for place, at in enumerate(USUAL.methods[0].lengths)
        ]
        method = USUAL.methods[0].model_copy(update={"lengths": lengths})
        figure = perplexity_picture(USUAL.model_copy(update={"methods": [method]})).figure
        shaded = [length for trace in figure.data if trace.fill == "toself" for length in set(trace.x)]
        beside = {place for place in range(4) if {place - 1, place + 1} - set(without) & set(range(4))}
        assert sorted(shaded) == [DOUBLING[place] for place in sorted(beside - set(without))]

    def test_a_point_without_an_interval_has_no_bar(self) -> None:
        assert [trace.error_y.array for trace in perplexity_picture(SHAPES["one point"]).figure.data] == [None]

    def test_names_model_protocol_documents_and_last_values(self) -> None:
        shown = texts(USUAL)
        title = " ".join(shown)
        for part in ("tiny", "curve protocol", "python-reference", "5,000 tokens", "quarters of the document"):
            assert part in title
        legend = ["at 2,048 tokens", "default: 400.0", "yarn(factor=8): 7.600", "alibi on tiny-alibi: 6.500"]
        assert [text for text in shown if text in legend] == legend

    def test_a_result_of_an_earlier_version_says_over_what_its_intervals_are(self) -> None:
        kept = result_of({"default": [7.0, 9.0]}, [256, 512], kind="blocks").model_dump_json()
        read = PerplexityResult.model_validate_json(kept)
        assert "95 % interval over blocks of 64 tokens" in " ".join(texts(read))

    @ANY_SHAPE
    def test_the_legend_has_every_method_inside_the_picture(self, result: PerplexityResult) -> None:
        figure = raster(perplexity_picture(result).figure)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        boxes = [text.get_window_extent() for text in legend.get_texts()]
        assert len(boxes) == len(result.methods)
        assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(boxes))
        (axes,) = figure.axes
        left = axes.get_window_extent().x1
        assert all(left < box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0 for box in boxes)

    def test_a_blow_up_does_not_flatten_the_other_lines(self) -> None:
        (axes,) = raster(perplexity_picture(SHAPES["blow-up"]).figure).axes
        assert axes.get_ylim()[1] < 1000
        assert any("lines that leave the picture reach 100,000" in text for text in texts(SHAPES["blow-up"]))
        assert "default: 100,000" in texts(SHAPES["blow-up"])

    def test_a_blow_up_alone_is_shown_in_full(self) -> None:
        result = result_of({"default": [6.5, 1e5]}, [256, 512])
        assert raster(perplexity_picture(result).figure).axes[0].get_ylim()[1] > 1e5

    def test_threads_draw_the_same_picture(self) -> None:
        picture = perplexity_picture(USUAL)
        expected = picture.png()
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: picture.png(), range(8))) == {expected}


class TestHtml:
    def data(self, result: PerplexityResult) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        figure = figures_of(plot_page(perplexity_picture(result)))["perplexity"]
        return figure["data"], figure["wide"]

    @ANY_SHAPE
    def test_loads_nothing_from_elsewhere(self, result: PerplexityResult) -> None:
        page = plot_page(perplexity_picture(result))
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)
        assert [tag for tag in tags if "src=" in tag or "href=" in tag] == []
        assert "plotly.js v" in page

    def test_has_the_measured_numbers(self) -> None:
        traces, layout = self.data(USUAL)
        lines = [trace for trace in traces if trace["mode"] == "lines+markers"]
        assert [line["name"] for line in lines] == [
            "default: 400.0",
            "yarn(factor=8): 7.600",
            "alibi on tiny-alibi: 6.500",
        ]
        for line, method in zip(lines, USUAL.methods, strict=True):
            assert line["x"] == DOUBLING
            assert line["y"] == [at.perplexity for at in method.lengths]
        assert (layout["xaxis"]["type"], layout["yaxis"]["type"]) == ("log", "log")
        assert layout["xaxis"]["ticktext"] == TICKS
        assert layout["shapes"][0]["x0"] == 256

    def test_names_cannot_run_scripts(self) -> None:
        attack = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
        result = result_of({attack: [7.0]}, [256], documents=[attack])
        result.model = attack
        page = plot_page(perplexity_picture(result))
        assert "<script>alert" not in page
        assert "<img src=x" not in page


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
