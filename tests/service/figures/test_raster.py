"""Plotly figures drawn by matplotlib, artist by artist."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.image import imread
from matplotlib.patches import Polygon, Rectangle
from matplotlib.text import Text

from service.figures import pictures_of
from service.figures.drawing.axes import linear_axis, log_axis, token_axis
from service.figures.drawing.bars import Bar, add_bars
from service.figures.drawing.charts import LABEL_CHARS, mark_trained, new_figure
from service.figures.drawing.curves import Curve, add_curves
from service.figures.drawing.panels import Panel, heat_maps
from service.figures.drawing.raster import pdf, png, raster, svg
from service.figures.drawing.raster_text import FONTS, families, text
from service.figures.drawing.style import COLOURS
from tests.service.figures.examples import EVERY, pictures

COUNTS = {
    "perplexity": 3,
    "long_perplexity": 3,
    "passkey": 4,
    "ruler": 4,
    "probe": 3,
    "sweep": 2,
    "recommend": 2,
    "search": 2,
}
"""Of a sweep only its own: the others are those of its parts."""
ANY_PICTURE = pytest.mark.parametrize(
    ("evaluation", "index"), [(name, index) for name, count in COUNTS.items() for index in range(count)]
)


def data_lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """x and y of the lines that are drawn in data coordinates."""
    lines = [line for line in axes.get_lines() if line.get_transform() == axes.transData]
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in lines]


def curves() -> go.Figure:
    figure = new_figure("title", "subtitle")
    x = token_axis("tokens", [256, 512, 1024], 256)
    figure.update_layout(xaxis=x, yaxis=log_axis("perplexity", 1, 100))
    mark_trained(figure, 256, x)
    add_curves(
        figure,
        [
            Curve("a", [256, 512, 1024], [5, 6, 50], [4, 5, 40], [6, 7, 60]),
            Curve("b", [256, 512, 1024], [5, 5, 5]),
            Curve("c", [256, 512], [7, 8]),
        ],
    )
    return figure


def named(*names: str) -> go.Figure:
    """Lines with these names, the first of which is the title too."""
    figure = new_figure(names[0], "")
    add_curves(figure, [Curve(name, [1, 2], [1, 2 + place]) for place, name in enumerate(names)])
    return figure


class TestPng:
    @ANY_PICTURE
    def test_has_the_figures_proportions_and_is_not_blank(self, evaluation: str, index: int) -> None:
        picture = pictures(evaluation)[index]
        image = imread(io.BytesIO(picture.png()))[..., :3]
        height = picture.figure.layout.height
        assert image.shape[:2] == (round(1.5 * height), 1500)
        assert 0.002 < (image.mean(-1) < 0.6).mean() < 0.6
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert (border == 1).all(), "something is cut off"
        colours = (image[::3, ::3] * 255).astype(int) @ [65536, 256, 1]
        assert len(np.unique(colours)) > 30

    def test_every_evaluation_has_its_pictures(self) -> None:
        counts = {evaluation: len(pictures(evaluation)) for evaluation in EVERY}
        changes = 2  # those of the parts, which a sweep compares by itself
        assert counts == {**COUNTS, "sweep": 2 + COUNTS["perplexity"] + COUNTS["passkey"] - changes}

    def test_is_the_same_twice(self) -> None:
        first, second = (pictures_of(EVERY["ruler"]())[0].png() for _ in range(2))
        assert first == second


class TestLines:
    def test_every_line_with_its_numbers(self) -> None:
        (axes,) = raster(curves()).axes
        assert data_lines(axes) == [
            ([256, 512, 1024], [5, 6, 50]),
            ([256, 512, 1024], [5, 5, 5]),
            ([256, 512], [7, 8]),
        ]

    @ANY_PICTURE
    def test_as_many_as_the_figure_has(self, evaluation: str, index: int) -> None:
        figure = pictures(evaluation)[index].figure
        wanted = sum(trace.type == "scatter" and trace.mode != "none" for trace in figure.data)
        bars = [trace.error_x if trace.type == "bar" else trace.error_y for trace in figure.data if "z" not in trace]
        whiskers = sum(bar.array is not None for bar in bars)
        drawn = sum(len(data_lines(axes)) for axes in raster(figure).axes)
        assert drawn == wanted + 2 * whiskers, "two caps stand for a whisker"

    def test_lines_differ_in_colour_dash_and_marker(self) -> None:
        (axes,) = raster(curves()).axes
        lines = [line for line in axes.get_lines() if line.get_transform() == axes.transData]
        assert [line.get_color() for line in lines] == list(COLOURS[:3])
        assert len({line.get_linestyle() for line in lines}) == 3
        assert len({line.get_marker() for line in lines}) == 3

    def test_intervals_are_filled_shapes(self) -> None:
        (axes,) = raster(curves()).axes
        (shape,) = axes.findobj(Polygon)
        corners = [tuple(corner) for corner in np.asarray(shape.get_xy())[:-1]]  # type: ignore[attr-defined]
        assert corners == [(256, 4), (512, 5), (1024, 40), (1024, 60), (512, 7), (256, 6)]
        assert shape.get_alpha() == 0.12

    def test_triangles_show_where_a_line_leaves_a_log_axis(self) -> None:
        figure = curves()
        figure.update_layout(yaxis=log_axis("perplexity", 1, 10))
        (axes,) = raster(figure).axes
        triangles = [np.asarray(points.get_offsets()) for points in axes.findobj(PathCollection)]  # type: ignore[attr-defined]
        assert [at.tolist() for points in triangles for at in points] == [[1024, 10]]

    def test_a_single_point_has_its_interval_as_a_bar(self) -> None:
        figure = new_figure("", "")
        figure.update_layout(yaxis=linear_axis("", 0, 10))
        add_curves(figure, [Curve("a", [256], [5], [4], [7])])
        (axes,) = raster(figure).axes
        (bar,) = (segment.tolist() for lines in axes.findobj(LineCollection) for segment in lines.get_segments())  # type: ignore[attr-defined]
        assert bar == [[256, 4], [256, 7]]

    def test_the_legend_has_last_values_in_their_order(self) -> None:
        figure = new_figure("", "")
        add_curves(figure, [Curve("a", [1, 2], [1, 2]), Curve("b", [1, 2], [1, 3])], end=str)
        (legend,) = raster(figure).legends
        assert [entry.get_text() for entry in legend.get_texts()] == ["b: 3", "a: 2"]

    def test_a_gap_stays_a_gap(self) -> None:
        figure = new_figure("", "")
        add_curves(figure, [Curve("a", [1, 2, 3], [1, None, 3])])
        (_, y), *_ = data_lines(raster(figure).axes[0])
        assert np.isnan(y).tolist() == [False, True, False]


class TestAxes:
    def test_log_ticks_say_the_numbers(self) -> None:
        (axes,) = raster(curves()).axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xticks().tolist() == [256, 512, 1024]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512", "1,024"]
        assert axes.get_ylim() == pytest.approx((1, 100))

    def test_the_trained_length_is_a_dashed_line_with_its_name(self) -> None:
        (axes,) = raster(curves()).axes
        marks = [line for line in axes.get_lines() if line.get_transform() != axes.transData]
        assert [list(map(float, line.get_xdata())) for line in marks] == [[256, 256]]  # type: ignore[arg-type]
        assert marks[0].is_dashed()
        note = next(note for note in axes.texts if note.get_text() == "trained length 256")
        assert note.get_position()[0] == pytest.approx(256)

    def test_beyond_the_trained_length_is_shaded(self) -> None:
        (axes,) = raster(curves()).axes
        (shade,) = (patch for patch in axes.patches if isinstance(patch, Rectangle))
        assert shade.get_x() == 256
        assert shade.get_x() + shade.get_width() == pytest.approx(axes.get_xlim()[1])
        assert shade.get_alpha() == 0.035

    def test_many_lengths_keep_the_last_tick_and_few_others(self) -> None:
        axis = token_axis("", list(range(256, 65537, 256)), 256)
        assert len(axis["tickvals"]) <= 10
        assert axis["tickvals"][-1] == 65536

    def test_names_are_not_read_as_formulas(self) -> None:
        figure = new_figure("$x$", "100 $ and $ more")
        add_curves(figure, [Curve("$\\frac{a}$", [1, 2], [1, 2]), Curve("\ue000 \x00", [1, 2], [2, 1])])
        drawn = raster(figure)
        drawn.draw_without_rendering()
        shown = [label.get_text() for label in drawn.findobj(Text) if isinstance(label, Text)]
        assert "\\$\\frac{a}\\$" in shown
        assert "\\ue000 \\x00" in shown

    @pytest.mark.parametrize("form", [png, pdf])
    def test_a_name_without_glyphs_stays_distinct(
        self, form: Callable[[go.Figure], bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Matplotlib warns of a missing glyph, which fails a test."""
        monkeypatch.setattr("service.figures.drawing.raster_text.FONTS", FONTS[:1])
        names = "训练前", "训练后", "a\x1b🚀"
        assert [text(name) for name in names] == ["\\u8bad\\u7ec3\\u524d", "\\u8bad\\u7ec3\\u540e", "a\\x1b\\U0001f680"]
        assert form(named(*names)) != form(named(names[1], names[0], names[2]))

    def test_long_names_without_glyphs_differ_and_have_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.figures.drawing.raster_text.FONTS", FONTS[:1])
        long = "训练之前的模型检查点"
        drawn = raster(named(f"{long}甲", f"{long}乙"))
        (legend,) = drawn.legends
        first, second = (entry.get_text() for entry in legend.get_texts())
        assert first != second
        assert max(len(first), len(second)) <= LABEL_CHARS
        assert legend.get_window_extent().x1 <= drawn.bbox.width

    def test_wide_names_of_bars_have_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.figures.drawing.raster_text.FONTS", FONTS[:1])
        figure = new_figure("", "")
        add_bars(figure, [Bar("训练前", 2, "two", 0, (1, 4))], linear_axis("", 0, 10))
        (axes,) = raster(figure).axes
        assert min(tick.get_window_extent().x0 for tick in axes.get_yticklabels()) >= 0

    def test_an_svg_keeps_every_name(self) -> None:
        drawn = svg(named("训练前", "हिन्दी", "🚀", "a\x1b\ufffe"))
        assert all(f">{name}<" in drawn for name in ("训练前", "हिन्दी", "🚀", "a\\x1b\\ufffe"))

    def test_other_fonts_draw_what_the_first_one_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """STIX comes with Matplotlib, and has a letter that DejaVu Sans lacks."""
        figure = named("\U0001d42c")
        before = png(figure)
        monkeypatch.setattr("service.figures.drawing.raster_text.FONTS", ("DejaVu Sans", "No Such", "STIXGeneral"))
        assert (text("\U0001d42c"), families()) == ("\U0001d42c", ["DejaVu Sans", "STIXGeneral"])
        assert png(figure) != before
        assert b"STIX" in pdf(figure)

    @pytest.mark.parametrize(
        ("shown", "drawn"),
        [("<b>title</b>", "title"), ("a<br>b", "a\nb"), ("&lt;b&gt; &amp; &#36;", "<b> & \\$"), ("1 < 2", "1 < 2")],
    )
    def test_text_without_tags(self, shown: str, drawn: str) -> None:
        assert text(shown) == drawn


class TestBars:
    def bars(self, axis: dict[str, object]) -> Axes:
        figure = new_figure("", "")
        bars = [Bar("a", 2, "two", 0, (1, 4)), Bar("b", None, "none", 1), Bar("c", 8, "eight", 2, (7, 9), best=True)]
        add_bars(figure, bars, axis)
        (axes,) = raster(figure).axes
        return axes

    def test_reach_from_zero_to_the_values(self) -> None:
        axes = self.bars(linear_axis("", 0, 10))
        drawn = [(bar.get_x(), bar.get_width()) for bar in axes.patches if isinstance(bar, Rectangle)]
        assert drawn[0] == (0, 2)
        assert drawn[2] == (0, 8)
        assert np.isnan(drawn[1][1])

    def test_reach_from_the_axis_end_where_it_is_logarithmic(self) -> None:
        axes = self.bars(log_axis("", 1, 10))
        first = axes.patches[0]
        assert isinstance(first, Rectangle)
        assert (first.get_x(), first.get_x() + first.get_width()) == pytest.approx((1, 2))

    def test_are_named_valued_and_hatched(self) -> None:
        axes = self.bars(linear_axis("", 0, 10))
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "★ c"]
        assert [note.get_text() for note in axes.texts] == ["two", "none", "eight"]
        assert len({patch.get_hatch() for patch in axes.patches}) == 3

    def test_whiskers_are_the_intervals(self) -> None:
        axes = self.bars(linear_axis("", 0, 10))
        ends = [segment[:, 0].tolist() for lines in axes.collections for segment in lines.get_segments()]  # type: ignore[attr-defined]
        assert ends == [[1, 4], [7, 9]]


class TestHeatMaps:
    def figure(self) -> go.Figure:
        panels = [
            Panel(name, [0, 1], [0, 1, 2], [[0, 0.5], [None, 1], [0.25, 0.75]], [["a", "b"], ["c", "d"], ["e", "f"]])
            for name in ("one", "two", "three", "four")
        ]
        axes = linear_axis("x", -0.5, 1.5), linear_axis("y", 2.5, -0.5)
        return heat_maps(panels, ("", ""), axes, {"cmin": 0, "cmax": 1})

    def test_cells_are_the_values(self) -> None:
        *panels, bar = raster(self.figure()).axes
        assert len(panels) == 4
        for panel in panels:
            (mesh,) = panel.findobj(QuadMesh)
            cells = np.ma.asarray(mesh.get_array())  # type: ignore[attr-defined]
            assert cells.filled(-1).tolist() == [[0, 0.5], [-1, 1], [0.25, 0.75]]
            assert mesh.get_clim() == (0, 1)  # type: ignore[attr-defined]
            assert panel.get_ylim() == (2.5, -0.5)
        assert bar.get_ylim() == (0, 1)

    def test_texts_stand_in_cells_that_have_a_value_and_can_be_read(self) -> None:
        panel = raster(self.figure()).axes[0]
        written = {note.get_text(): note for note in panel.texts}
        assert set(written) == {"a", "b", "d", "e", "f"}
        assert written["f"].get_position() == (1, 2)
        assert written["a"].get_color() == "white"
        assert written["d"].get_color() != "white"


def test_an_unknown_kind_of_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="pie"):
        raster(go.Figure(go.Pie(values=[1, 2])))
