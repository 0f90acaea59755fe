"""Figures on pages: for wide and narrow screens, light and dark, with and without Plotly's script in the page."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest

from patches import parse
from service.figures import pictures_of
from service.figures.drawing.bars import WIDTH
from service.figures.drawing.charts import CHAR, GAP, LINE
from service.figures.drawing.style import COLOURS, DARK, FAINT, GRID, INK, PAPER
from service.figures.encodings.positions import distance_figure
from service.figures.encodings.samples import GEOMETRY, TRAINED
from service.figures.web.layouts import BAR_ROWS, NARROW, TEXT_LINE, narrow, wide
from service.figures.web.page import PLOTLY_FROM_A_PAGE, plot_page, with_code
from tests.service.figures import examples
from tests.service.figures.examples import EVERY, figures_of, pictures


def panels(layout: dict[str, Any], axis: str) -> list[tuple[float, float]]:
    """Ends of the panels' domains, the first panel's first."""
    names = sorted((name for name in layout if name.startswith(axis)), key=lambda name: int(name[5:] or 1))
    return [tuple(layout[name].get("domain", (0, 1))) for name in names]


@pytest.mark.parametrize("evaluation", EVERY)
class TestLayouts:
    def test_the_page_has_the_titles(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            assert "title" not in {*wide(picture.figure), *narrow(picture.figure)}
        page = html.unescape(re.sub(r"<script.*?</script>", "", plot_page(pictures(evaluation)[0]), flags=re.DOTALL))
        first = pictures(evaluation)[0]
        assert f"<h1>{first.title}</h1>" in page
        assert first.subtitle in page
        assert first.caption in page

    def test_the_figures_themselves_stay(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            before = picture.figure.to_json()
            wide(picture.figure), narrow(picture.figure)
            assert picture.figure.to_json() == before

    def test_axes_have_most_of_a_telephones_width(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            margin = narrow(picture.figure)["margin"]
            assert margin["l"] + margin["r"] <= 0.25 * NARROW

    def test_panels_are_one_below_the_other(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            layout = narrow(picture.figure)
            drawn = {(trace.xaxis or "x", trace.yaxis or "y") for trace in picture.figure.data}
            assert {tuple(layout[f"xaxis{x[1:]}"].get("domain", (0, 1))) for x, _ in drawn} == {(0, 1)}
            domains = sorted(tuple(layout[f"yaxis{y[1:]}"].get("domain", (0, 1))) for _, y in drawn)
            assert all(low[1] < high[0] for low, high in pairwise(domains))
            assert (domains[0][0], domains[-1][1]) == pytest.approx((0, 1))

    def test_legends_are_outside_the_plot(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            side, below = wide(picture.figure)["legend"], narrow(picture.figure)["legend"]
            assert (side["x"], side["xanchor"]) == (1.01, "left")
            if any(trace.type == "scatter" and trace.showlegend for trace in picture.figure.data):
                assert (below["orientation"], below["yref"], below["yanchor"]) == ("h", "container", "bottom")
                assert narrow(picture.figure)["margin"]["b"] > wide(picture.figure)["margin"]["b"]


class TestNarrow:
    def test_names_of_bars_are_above_them(self) -> None:
        picture = pictures("sweep")[0]
        layout = narrow(picture.figure)
        assert layout["yaxis"]["showticklabels"] is False
        beside = [note for note in layout["annotations"] if note.get("yref") == "y"]
        assert beside[0]["text"] == "<b>★ yarn(factor=8)</b>  7.530, not enough?"
        assert all((note["x"], note["xanchor"]) == (0, "left") for note in beside)

    def test_a_text_that_is_too_long_is_below_the_name(self) -> None:
        names = ["default", "self_extend(group_size=4, neighbor_window=64)"]
        layout = narrow(pictures_of(EVERY["sweep"](names))[0].figure)
        beside = next(note for note in layout["annotations"] if "self_extend" in note["text"])
        assert beside["text"].startswith("<b>")
        first, second = beside["text"].split("</b><br>")
        assert CHAR * max(len(first) - len("<b>"), len(second)) <= NARROW
        row, bar = BAR_ROWS[2], WIDTH * BAR_ROWS[2]
        assert beside["yshift"] - 2 * TEXT_LINE / 2 >= bar / 2 - 0.01, "above its own bar"
        assert beside["yshift"] + 2 * TEXT_LINE / 2 <= row - bar / 2 + 0.01, "and below the one before"

    def test_a_title_of_an_axis_is_above_the_next_panel(self) -> None:
        recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
        layout = narrow(distance_figure(recipe, 64, TRAINED, "rerope"))
        inner = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
        first, second = (layout[f"yaxis{number}"]["domain"] for number in ("", 2))
        assert layout["xaxis"]["title"]["text"] == "key"
        assert inner * (first[0] - second[1]) == pytest.approx(GAP + LINE, abs=1)

    def test_one_name_has_a_legend_below(self) -> None:
        layout = narrow(pictures_of(examples.perplexity(["default"]))[0].figure)
        assert (layout["legend"]["orientation"], layout["legend"]["yref"]) == ("h", "container")

    def test_titles_of_panels_go_with_them(self) -> None:
        picture = next(picture for picture in pictures("passkey") if picture.name == "retrieval")
        layout = narrow(picture.figure)
        tops = {note["text"]: note["y"] for note in layout["annotations"]}
        shown = [layout[f"yaxis{number}"]["domain"][1] for number in ("", 2, 3, 4)]
        assert [tops[name] for name in examples.NAMES] == pytest.approx(shown)

    def test_the_colour_bar_is_below(self) -> None:
        picture = next(picture for picture in pictures("passkey") if picture.name == "retrieval")
        bar = narrow(picture.figure)["coloraxis"]["colorbar"]
        assert (bar["orientation"], bar["yref"], bar["yanchor"]) == ("h", "container", "bottom")

    def test_the_legend_keeps_its_title(self) -> None:
        legend = narrow(pictures("perplexity")[0].figure)["legend"]
        assert (legend["title"]["text"], legend["title"]["side"]) == ("at 2,048 tokens", "top")

    def test_panels_keep_their_height(self) -> None:
        picture = next(picture for picture in pictures("passkey") if picture.name == "retrieval")

        def heights(layout: dict[str, Any]) -> list[float]:
            inner = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
            return [inner * (high - low) for low, high in panels(layout, "yaxis")[: len(examples.NAMES)]]

        assert heights(narrow(picture.figure)) == pytest.approx(heights(wide(picture.figure)), rel=0.01)

    def test_the_legend_has_a_line_for_every_name(self) -> None:
        picture = pictures("passkey")[1]
        legend = narrow(picture.figure)["legend"]
        assert legend["entrywidth"] > NARROW / 2, "two side by side need as much room as their letters are wide"
        assert legend["maxheight"] >= LINE * len(examples.NAMES), "the rest would be hidden"


def test_text_between_backticks_is_code_and_all_is_escaped() -> None:
    assert with_code("use `<yarn>` or <b>, not `") == "use <code>&lt;yarn&gt;</code> or &lt;b&gt;, not `"


class TestDark:
    def test_what_is_dark_ink_on_light_paper_has_another_colour(self) -> None:
        assert {INK, FAINT, GRID, PAPER} <= set(DARK)
        assert all(contrast(DARK.get(colour, colour), DARK[PAPER]) >= 3 for colour in (*COLOURS, INK, FAINT))
        assert all(contrast(colour, "#ffffff") >= 2 for colour in (*COLOURS, INK, FAINT))

    def test_whiskers_are_readable_on_every_bar_and_beside_it(self) -> None:
        bars = [trace for trace in pictures_of(EVERY["sweep"](list("abcdefg")))[0].figure.data if trace.type == "bar"]
        assert {trace.marker.color for trace in bars} == set(COLOURS)
        for bar in bars:
            assert contrast(bar.error_x.color, bar.marker.color) >= 3
            assert contrast(bar.error_x.color, "#ffffff") >= 3

    def test_the_script_has_them(self) -> None:
        page = plot_page(pictures("perplexity")[0])
        (colours,) = re.findall(r'id="dark-colours">(.*?)</script>', page)
        assert json.loads(colours) == DARK
        assert "prefers-color-scheme: dark" in page
        assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


class TestScript:
    def test_figures_stay_on_the_page(self) -> None:
        """Plotly's bar offers to upload them otherwise."""
        shown = pictures("perplexity")[0]
        for page in (plot_page(shown, PLOTLY_FROM_A_PAGE), shown._repr_html_().rpartition('"responsive"')[2]):
            assert re.search(r'showSendToCloud"?: false', page)

    def test_a_page_of_the_server_is_small(self) -> None:
        picture = pictures("perplexity")[0]
        assert len(plot_page(picture, PLOTLY_FROM_A_PAGE)) < 40_000
        assert len(plot_page(picture)) > 4_000_000

    def test_without_the_script_the_page_says_where_it_is(self) -> None:
        page = plot_page(pictures("perplexity")[0], PLOTLY_FROM_A_PAGE)
        assert "?standalone=true" in page
        assert "without-plotly" in page

    def test_both_have_the_same_figure(self) -> None:
        picture = pictures("ruler")[0]
        assert figures_of(plot_page(picture)) == figures_of(plot_page(picture, PLOTLY_FROM_A_PAGE))

    def test_nothing_in_a_figure_ends_its_script(self) -> None:
        attack = "</script><!--<script>"
        page = plot_page(pictures_of(examples.perplexity([attack]))[0])
        (figure,) = figures_of(page).values()
        assert html.unescape(figure["data"][-1]["name"]).startswith(f"{attack}: ")


def test_results_are_drawn_without_torch() -> None:
    """Workers that only draw start fast and stay small. One PNG has the drawing code of all."""
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing either fails
from pydantic import TypeAdapter
from service.evaluation.catalogue import any_result
from service.figures.picture import Picture
from service.figures.results import html_of, picture_of
from service.reports.html import report_of
for number, line in enumerate(sys.stdin):
    result = TypeAdapter(any_result()).validate_json(line)
    print(result.evaluation, number > 0 or len(picture_of(result).png()) > 1000, len(html_of(result)) > 1000,
          len(report_of(result)) > 1000)
    Picture.png = lambda _: b""
"""
    results = "\n".join(make().model_dump_json() for make in EVERY.values())
    ran = subprocess.run([sys.executable, "-c", code], input=results, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines() == [f"{name} True True True" for name in EVERY], ran.stderr


def contrast(first: str, second: str) -> float:
    """Of two colours #rrggbb (WCAG 2.2, relative luminance)."""
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
