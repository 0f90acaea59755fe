"""Pictures show the measured numbers: as page, PNG, table and in notebooks."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches import from_text, parse, resolve
from service.evaluation.recommend.results import OTHERS
from service.evaluation.scores import Interval
from service.evaluation.search.results import FOUND
from service.figures import Picture, pictures_of
from service.figures.drawing.style import COLOURS, LineStyle, different, line_style
from service.figures.encodings.overview import Setting, encoding_pictures
from service.figures.encodings.samples import GEOMETRY
from service.figures.results import html_of, picture_of
from service.figures.web.page import plot_page
from tests.service.figures import examples
from tests.service.figures.examples import EVERY, pictures
from tests.service.figures.measured import LENGTHS, NAMES


def named(evaluation: str, name: str) -> Picture:
    return next(picture for picture in pictures(evaluation) if picture.name == name)


def lines(picture: Picture) -> dict[str, tuple[list[float], list[float]]]:
    """x and y by name of the lines in the legend."""
    return {
        trace.name.split(": ")[0]: (list(trace.x), list(trace.y))
        for trace in picture.figure.data
        if trace.type == "scatter" and trace.mode != "none" and trace.showlegend is not False
    }


def looks_in(shown: Sequence[Picture]) -> dict[str, set[Any]]:
    """Styles of lines and colours of bars by name, over all pictures."""
    found: dict[str, set[Any]] = {}
    for trace in (trace for picture in shown for trace in picture.figure.data):
        name = (trace.name or "").split(": ")[0]
        if trace.type == "bar":
            found.setdefault(name, set()).add(trace.marker.color)
        elif trace.type == "scatter" and trace.line.dash and name not in ("before", "single heads"):
            found.setdefault(name, set()).add(LineStyle(trace.line.color, trace.line.dash, trace.marker.symbol))
    return found


class TestData:
    def test_perplexity(self) -> None:
        result = examples.perplexity()
        expected = {m.label: (list(LENGTHS), [at.perplexity for at in m.lengths]) for m in result.methods}
        assert lines(pictures_of(result)[0]) == expected

    def test_nll_by_position_between_the_ends_of_its_buckets(self) -> None:
        result = examples.perplexity()
        for (name, (x, y)), method in zip(lines(pictures_of(result)[1]).items(), result.methods, strict=True):
            assert name == method.label
            assert y == [bucket.nll_mean for bucket in method.nll_by_position]
            for at, bucket in zip(x, method.nll_by_position, strict=True):
                assert bucket.start < at < bucket.stop

    def test_recall_has_its_own_caption_and_no_verdict_about_loss(self) -> None:
        loss, recall = named("recommend", "difference"), named("recommend", "recall")
        assert loss.caption.startswith("Loss over the windows")
        assert loss.caption.endswith(OTHERS)
        assert recall.caption.startswith("Share of the tokens of a repeated segment")
        texts = [[note.text for note in one.figure.layout.annotations if note.yref == "y"] for one in (loss, recall)]
        verdicts = [text.partition(", ")[2] for text in texts[0]]
        assert verdicts == ["recommended · 32 windows", "worse · 32 windows", *["dropped · 2 windows"] * 2]
        assert [text.partition(" % · ")[2] for text in texts[1]] == [*["32 windows"] * 2, *["2 windows"] * 2]

    def test_retrieval_by_length_and_depth(self) -> None:
        result = examples.passkey()
        maps = named("passkey", "retrieval").figure.data
        assert len(maps) == len(result.methods)
        for shown, method in zip(maps, result.methods, strict=True):
            cells = {(cell.length, cell.depth): cell.score for cell in method.cells}
            for row, depth in enumerate(result.depths):
                for column, length in enumerate(result.lengths):
                    assert shown.z[row][column] == cells[length, depth]
                    assert shown.text[row][column] == f"{100 * cells[length, depth]:g} %"

    def test_retrieval_grid_with_a_cell_that_was_not_measured(self) -> None:
        result = examples.passkey()
        del result.methods[0].cells[0]
        assert pictures_of(result)[0].figure.data[0].z[0][0] is None
        assert pictures_of(result)[0].png()

    def test_effective_lengths(self) -> None:
        picture = named("ruler", "effective-length")
        bars = [trace.x[0] for trace in picture.figure.data]
        assert bars == [None, 256, 512, 1024]
        assert [row["effective_length"] for row in picture.rows] == bars
        notes = [note.text for note in picture.figure.layout.annotations]
        assert notes[:4] == ["below 256", "256", "512", "1,024"]

    def test_the_farthest_that_was_measured_may_not_be_the_end(self) -> None:
        result = examples.ruler()
        result.methods[3].effective_length = 2048
        assert pictures_of(result)[1].figure.layout.annotations[3].text == "2,048 or more"

    def test_ruler_scores_and_their_threshold(self) -> None:
        result = examples.ruler()
        picture = named("ruler", "ruler")
        drawn = lines(picture)
        assert {name: y for name, (_, y) in drawn.items()} == {
            method.label: [at.score for at in method.lengths] for method in result.methods
        }
        assert all(x == pytest.approx(LENGTHS, rel=0.05) for x, _ in drawn.values()), "whiskers lie side by side"
        assert 0.856 in [shape.y0 for shape in picture.figure.layout.shapes]

    def test_attention_has_every_head_and_their_mean(self) -> None:
        result = examples.probe()
        picture = named("probe", "attention-1024")
        faint = [trace for trace in picture.figure.data if trace.opacity == 0.35]
        assert len(faint) == len(result.methods)
        first = result.methods[0].attention[0].buckets
        assert list(faint[0].y[: len(first)]) == [bucket.mass for bucket in first]
        assert sum(value is None for value in faint[0].y) == 2 * 4, "a gap after every head"
        for name, (_, y) in lines(picture).items():
            method = next(method for method in result.methods if method.label == name)
            assert y == [bucket.mass for bucket in method.attention_mean[0].buckets]
            assert sum(y) == pytest.approx(1)

    def test_copying_with_its_intervals(self) -> None:
        result = examples.probe()
        picture = named("probe", "copying")
        band, line = picture.figure.data[:2]
        assert list(line.y) == [at.accuracy for at in result.methods[0].copying]
        low, high = list(band.y[:4]), list(band.y[:3:-1])
        assert low == [at.interval.low for at in result.methods[0].copying]
        assert high == [at.interval.high for at in result.methods[0].copying]

    def test_long_perplexity_where_there_is_one(self) -> None:
        shown = lines(named("long_perplexity", "long-perplexity"))
        assert shown[NAMES[0]] == ([512, 1024, 2048], [180, 600, 800])

    def test_legends_of_long_perplexity_have_the_last_values(self) -> None:
        picture = named("long_perplexity", "long-perplexity").figure
        assert picture.layout.legend.title.text == "at 2,048 tokens"
        assert {trace.name for trace in picture.data if trace.showlegend} >= {f"{NAMES[0]}: 800.0"}

    def test_long_perplexity_has_its_key_tokens_below_each_length(self) -> None:
        result = examples.long_perplexity()
        picture, plain, *_ = pictures_of(result)
        assert list(picture.figure.layout.xaxis.ticktext) == [
            *("256<br>0 key", "512<br>64 key", "1,024<br>64 key", "2,048<br>64 key")
        ]
        assert not any("key" in text for text in plain.figure.layout.xaxis.ticktext)
        assert "205 of 2,048" in picture.caption
        assert "205" not in picture.subtitle
        assert result.cautions()[0] in picture.caption

    def test_long_perplexity_intervals_are_on_the_picture(self) -> None:
        result = examples.long_perplexity()
        at = result.methods[2].lengths[-1]
        at.interval = Interval(low=8.0, high=500.0, kind="blocks")
        low, high = (10**end for end in pictures_of(result)[0].figure.layout.yaxis.range)
        assert low < 8.0
        assert high > 500.0
        at.interval = Interval(low=0.0, high=1e300, kind="blocks")
        low, high = (10**end for end in pictures_of(result)[0].figure.layout.yaxis.range)
        assert 5 < low < 8, "half the least value, with a margin"
        assert 500 < high < 800, "less than the line that leaves the picture"

    def test_whiskers_of_a_sweep_are_on_the_picture(self) -> None:
        result = examples.sweep()
        for method in result.methods:
            method.judgements[0].interval = Interval(low=6.0, high=700.0, kind="documents")
        low, high = (10**end for end in pictures_of(result)[0].figure.layout.xaxis.range)
        assert low < 6.0
        assert high > 700.0
        result.methods[0].judgements[0].interval = Interval(low=0.0, high=1e300, kind="documents")
        assert pictures_of(result)[0].figure.layout.xaxis.range[1] < 3.1

    def test_a_sweep_has_its_parts_and_bars_at_the_target(self) -> None:
        result = examples.sweep()
        found = pictures("sweep")
        assert [picture.name for picture in found][:3] == ["target-1", "target-2", "1-perplexity"]
        assert len({picture.name for picture in found}) == len(found)
        bars = {trace.name: trace.x[0] for trace in found[0].figure.data}
        assert bars == {method.label: method.judgements[0].value for method in result.methods}
        assert found[0].figure.layout.shapes[0].x0 == 7.15
        error = next(bar.error_x for bar in found[1].figure.data if bar.name == result.methods[1].label)
        interval = result.methods[1].judgements[1].interval
        assert interval is not None
        assert (error.arrayminus[0], error.array[0]) == (0.2 - interval.low, interval.high - 0.2)


class TestForms:
    @pytest.mark.parametrize("evaluation", EVERY)
    def test_rows_have_the_same_keys_and_csv_gives_them_back(self, evaluation: str) -> None:
        for picture in pictures(evaluation):
            assert picture.rows
            assert {tuple(row) for row in picture.rows} == {tuple(picture.rows[0])}
            read = list(csv.DictReader(io.StringIO(picture.csv())))
            assert read == [{k: "" if v is None else str(v) for k, v in row.items()} for row in picture.rows]

    def test_no_spreadsheet_runs_a_name(self) -> None:
        picture = pictures_of(examples.perplexity(["=1+1"]))[1]
        assert "'=1+1" in picture.csv()

    @pytest.mark.parametrize("evaluation", ["perplexity", "ruler"])
    def test_the_first_picture_is_the_results_own(self, evaluation: str) -> None:
        result, first = EVERY[evaluation](), pictures(evaluation)[0]
        assert picture_of(result).png() == first.png()
        assert first.title in html_of(result)

    @pytest.mark.parametrize("evaluation", EVERY)
    def test_a_page_loads_nothing_and_runs_no_name(self, evaluation: str) -> None:
        attack = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>"
        picture = pictures_of(EVERY[evaluation]([attack, "b", "c", "d"]))[0]
        page = plot_page(picture)
        assert page.count("<script") == page.count("</script>") == 4, "Plotly, the figure, the colours, the drawing"
        body = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
        assert re.findall(r"\b(?:src|href|on\w+)=", body) == []
        assert "<script>alert" not in page
        assert "<img src=x" not in page

    def test_a_notebook_shows_it(self) -> None:
        picture = named("ruler", "effective-length")
        assert picture._repr_png_() == picture.png()
        assert "Plotly.newPlot" in picture._repr_html_()


class TestLooks:
    @pytest.mark.parametrize("evaluation", EVERY)
    def test_a_method_has_one_look_in_all_figures_of_the_same_methods(self, evaluation: str) -> None:
        """Whatever the order: a recommendation begins with the model's own encoding, and has no auto."""
        asked = ["yarn(factor=4)", "default", "auto", "linear(factor=4)"]
        wanted = {name: line_style(index) for name, index in zip(asked, (1, 0, 3, 2), strict=True)}
        for names in (asked, ["default", "yarn(factor=4)", "linear(factor=4)"]):
            found = looks_in(pictures_of(EVERY[evaluation](names)))
            found.pop(FOUND, None)  # a search draws its own line too
            assert found.keys() == set(names)
            for name, seen in found.items():
                assert seen <= {wanted[name], wanted[name].colour}, name

    def test_encodings_keep_their_looks_where_a_figure_has_some_of_them(self) -> None:
        encodings = {
            text: resolve(parse(from_text(text)), GEOMETRY, 1024)
            for text in ("alibi", "yarn:4", "default:attention_temperature=log_n", "linear:4")
        }
        pictures = encoding_pictures(encodings, Setting(resolve(parse("default"), GEOMETRY, 256).inv_freq, 256, 1024))
        shown = [one for one in pictures if one.name in ("wavelengths", "temperature", "similarity")]
        assert len(shown) == 3
        found = looks_in(shown)
        for index, text in enumerate(encodings, start=1):
            assert found.get(text, {line_style(index)}) == {line_style(index)}

    def test_panels_and_legends_cut_a_name_alike(self) -> None:
        name = "self_extend(group_size=5, base=yarn:4)"
        heat, by_length = pictures_of(examples.passkey([name, "b", "c"]))[:2]
        assert name in {note.text.replace("<br>", " ") for note in heat.figure.layout.annotations}
        assert name in lines(by_length)

    @pytest.mark.parametrize("evaluation", EVERY)
    def test_names_that_begin_alike_stay_different_in_every_picture(self, evaluation: str) -> None:
        names = [f"self_extend(group_size=4, neighbor_window=256, base=yarn:{n})" for n in ("4", "8", "16")]
        for picture in pictures_of(EVERY[evaluation](["default", *names])):
            drawn = [trace.name for trace in picture.figure.data if trace.name and trace.showlegend is not False]
            panels = [note.text for note in picture.figure.layout.annotations if "self_extend" in note.text]
            ticks = [text for text in picture.figure.layout.yaxis.ticktext or () if "self_extend" in text]
            for shown in (drawn, panels, ticks):
                assert len(set(shown)) == len(shown)
            whole = [text for shown in (drawn, panels, ticks) for text in shown if "self_extend" in text]
            assert whole or picture.name == "attention" or picture.name.endswith("by-base.factor"), picture.name
            assert all("base=yarn:" in text for text in whole), "the part that differs is there"

    def test_long_encodings_show_the_parameters_that_differ(self) -> None:
        base = "base=(yarn:attention_temperature=1.5,factor={})"
        parts = ([base.format(4), "group_size=4"], [base.format(8), "group_size=4"], [base.format(4)])
        names = [f"self_extend({', '.join(each)}) on tiny" for each in parts]
        assert list(different(["default", *names], 40).values()) == [
            "default",
            "self_extend(… factor=4) on tiny",
            "self_extend(… factor=4, group_size=4) o…",
            "self_extend(… factor=8, group_size=4) o…",
        ]

    def test_other_long_names_show_the_part_that_differs(self) -> None:
        names = [f"rerope on a-model-with-a-name-of-many-words-{end}" for end in ("base", "chat")]
        assert [text[-4:] for text in different(names, 40).values()] == ["base", "chat"]

    @given(
        st.lists(st.text("ab, ()", max_size=60), unique=True, max_size=40),
        st.sampled_from((12, 40)),
    )
    def test_short_names_differ_and_do_not_depend_on_their_order(self, names: list[str], most: int) -> None:
        short = different(names, most)
        assert list(map(len, map(set, (short, short.values())))) == [len(names), len(names)]
        assert all(len(text) <= most for text in short.values())
        assert different(names[::-1], most) == short
        whole = [name for name in names if len(name) <= most]
        assert [short[name] for name in whole] == whole, "a name that fits is kept"

    @pytest.mark.parametrize("evaluation", ["passkey", "ruler"])
    def test_the_legend_has_room(self, evaluation: str) -> None:
        for picture in pictures_of(EVERY[evaluation]([f"yarn(factor={n}, beta_fast=16.5)" for n in range(24)])):
            height = picture.figure.layout.height
            if height is not None:
                names = sum(trace.type == "scatter" and bool(trace.showlegend) for trace in picture.figure.data)
                assert height >= 20 * names

    def test_the_first_seven_colours_differ_to_the_colour_blind(self) -> None:
        """CIE 1976 distances under deuteranopia (Machado et al. 2009, severity 1); 2.3 is just noticeable."""
        seen = [_lab(np.clip(DEUTERANOPIA @ _linear(colour), 0, 1)) for colour in COLOURS[:7]]
        apart = [np.linalg.norm(a - b) for index, a in enumerate(seen) for b in seen[:index]]
        assert len(apart) == 21
        assert min(apart) > 15


def test_importing_the_folder_imports_no_drawing() -> None:
    code = "import service.figures, sys; print([m for m in ('plotly', 'matplotlib', 'torch') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
    code = "import service.figures.results, service.figures.drawing.raster, sys; print(sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'matplotlib.figure'" in printed.stdout
    assert "'matplotlib.pyplot'" not in printed.stdout


DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _linear(colour: str) -> Any:
    """Linear RGB of #rrggbb."""
    srgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _lab(linear: Any) -> Any:
    """CIE L*a*b* under D65."""
    ratio = XYZ @ linear / np.array([0.9505, 1, 1.089])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])
