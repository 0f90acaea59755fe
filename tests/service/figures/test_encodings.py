"""Pictures of encodings against formulas written out here."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from patches import parse
from service.figures.drawing.raster import png, raster
from service.figures.drawing.style import TIMES
from service.figures.encodings.frequencies import encoding_figure, frequency_figure
from service.figures.encodings.positions import distance_figure
from service.figures.encodings.samples import GEOMETRY, PAIRS, TRAINED, sample
from tests.service.figures.test_raster import data_lines

WAVES = [2 * np.pi * 10_000 ** (pair / PAIRS) for pair in range(PAIRS)]


def pairs(factor: float | None = 8.0, before: bool = True) -> list[dict[str, Any]]:
    return [
        {"pair": pair, "wavelength_before": wave if before else None, "wavelength_after": factor and wave * factor}
        for pair, wave in enumerate(WAVES)
    ]


def texts(figure: Any) -> list[str]:
    drawn = raster(figure)
    return [text.get_text() for text in drawn.findobj(Text) if isinstance(text, Text) and text.get_visible()]


class TestFrequencies:
    def test_draws_both_lines_and_their_ratio(self) -> None:
        upper, lower = raster(frequency_figure(pairs(), 256, "linear")).axes
        (_, before), (_, after) = data_lines(upper)
        assert np.divide(after, before) == pytest.approx(8.0)
        assert data_lines(lower)[0][1] == pytest.approx([8.0] * PAIRS)
        assert [label.get_text() for label in lower.get_yticklabels()] == [f"{times}{TIMES}" for times in (1, 2, 4, 8)]
        marks = [line.get_ydata() for line in upper.get_lines() if line.get_transform() != upper.transData]
        assert [list(mark) for mark in marks] == [[256, 256]]

    @pytest.mark.parametrize(
        ("factor", "before", "note"),
        [
            (None, True, "this encoding rotates nothing"),
            (None, False, "this encoding rotates nothing"),
            (1.0, False, "the checkpoint rotates nothing"),
        ],
    )
    def test_says_when_nothing_rotates(self, factor: float | None, before: bool, note: str) -> None:
        assert note in texts(frequency_figure(pairs(factor, before), 256, "none"))

    def test_pairs_that_do_not_rotate_leave_a_gap(self) -> None:
        given = pairs()
        for row in given[24:]:
            row["wavelength_after"] = None
        figure = frequency_figure(given, 256, "proportional")
        upper, lower = raster(figure).axes
        (_, before), (_, after) = data_lines(upper)
        assert not np.isnan(before).any()
        assert np.isnan(after).tolist() == [False] * 24 + [True] * 8
        assert np.isnan(data_lines(lower)[0][1]).tolist() == [False] * 24 + [True] * 8
        assert any("8 of 32 pairs do not rotate" in text for text in texts(figure))
        assert not any("rotates nothing" in text for text in texts(figure))

    @pytest.mark.parametrize(
        ("fields", "label", "last"),
        [
            ({"method": "rerope", "window": 64}, "effective distance, tokens", 64),
            ({"method": "streaming"}, "effective distance, tokens", 255),
            ({"method": "alibi"}, "added, per head", -511.5),
        ],
    )
    def test_shows_distances_and_biases_in_place_of_the_stretch(
        self, fields: dict[str, Any], label: str, last: float
    ) -> None:
        recipe = parse(fields).recipe(GEOMETRY)
        lower = raster(frequency_figure(pairs(None), 256, fields["method"], recipe, 1024)).axes[1]
        assert lower.get_ylabel() == label
        assert last in [y[at] for _, y in data_lines(lower) for at in (0, -1)] + [max(y) for _, y in data_lines(lower)]

    @pytest.mark.parametrize("count", [1, 2, 32])
    def test_draws_any_number_of_pairs(self, count: int) -> None:
        assert imread(io.BytesIO(png(frequency_figure(pairs()[:count], 256, "$\\frac{ 漢")))).shape[1] == 1500


def test_effective_distances_stop_where_the_encoding_says() -> None:
    recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
    z = distance_figure(recipe, 64, TRAINED, "rerope").data[0].z
    assert [z[63][key] for key in (63, 60, 50, 30, 0)] == [0, 3, 13, 16, 16]
    assert z[10][11] is None


def test_long_matrices_are_sampled_with_the_first_key_and_the_last_query() -> None:
    recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
    figure = distance_figure(recipe, 5000, TRAINED, "rerope")
    shown = figure.data[0]
    assert len(shown.x) == len(shown.y) <= 128
    assert (shown.x[0], shown.y[-1]) == (0, 4999)
    assert all(query >= key for query, key in zip(shown.y, shown.x, strict=True))


def test_the_first_keys_that_a_window_keeps_are_seen() -> None:
    recipe = parse({"method": "streaming", "sink_tokens": 4, "window": 128}).recipe(GEOMETRY)
    z = distance_figure(recipe, 4096, TRAINED, "streaming").data[0].z
    assert z[-1][0] is not None
    assert z[-1][5] is None


def test_the_last_token_beside_plain_rope() -> None:
    recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
    _, plain, moved = distance_figure(recipe, 64, TRAINED, "rerope").data
    assert list(plain.y) == list(plain.x) == list(range(63, -1, -1))
    assert list(moved.y) == [min(distance, 16) for distance in plain.x]


@pytest.mark.parametrize("name", ["self_extend", "dual_chunk", "streaming", "rerope", "string", "lm_infinite", "dpe"])
def test_an_encoding_that_only_moves_positions_is_drawn_as_distances(name: str) -> None:
    recipe = sample(name).resolved.recipe
    figure = encoding_figure(pairs(1.0), TRAINED, f"{name} on tiny", recipe, 64)
    assert figure == distance_figure(recipe, 4 * TRAINED, TRAINED, f"{name} on tiny")


@pytest.mark.parametrize(("name", "factor"), [("yarn", 4.0), ("self_extend", 4.0), ("alibi", 1.0)])
def test_an_encoding_that_changes_more_is_drawn_as_wavelengths(name: str, factor: float) -> None:
    recipe = sample(name).resolved.recipe
    figure = encoding_figure(pairs(factor), TRAINED, name, recipe, 64)
    assert figure == frequency_figure(pairs(factor), TRAINED, f"{name} at 64 tokens", recipe, 4 * TRAINED)
