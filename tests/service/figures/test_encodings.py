"""Pictures of encodings against formulas written out here."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest

from patches import parse
from service.figures import pictures_of_encoding
from service.figures.drawing.raster import raster
from service.figures.encodings.distances import (
    bias_picture,
    distance_picture,
    encoding_png,
    rotation_picture,
    sinusoid_picture,
)
from service.figures.encodings.frequencies import frequency_png
from service.figures.encodings.samples import GEOMETRY, HEADS, PAIRS, TRAINED, sample
from service.figures.picture import Picture
from tests.service.figures.test_raster import data_lines

PLAIN = [10_000 ** (-pair / PAIRS) for pair in range(PAIRS)]


def of(name: str, length: int = 1024) -> dict[str, Picture]:
    drawn = sample(name)
    return {picture.name: picture for picture in pictures_of_encoding(drawn.resolved, drawn.geometry, length, name)}


def test_wavelengths_before_and_after() -> None:
    picture = of("linear")["frequencies"]
    before, after = picture.figure.data
    assert list(before.y) == pytest.approx([2 * math.pi / theta for theta in PLAIN], rel=1e-5)
    assert np.divide(after.y, before.y) == pytest.approx(4.0)
    assert [row["wavelength_after"] for row in picture.rows] == list(after.y)
    assert TRAINED in [shape.y0 for shape in picture.figure.layout.shapes]


def test_pairs_that_do_not_rotate_leave_a_gap() -> None:
    still = [theta == 0 for theta in sample("proportional").resolved.inv_freq]
    assert any(still)
    after = of("proportional")["frequencies"].figure.data[1]
    assert [value is None for value in after.y] == still


def test_rotation_is_multiplication_by_a_unit_complex_number() -> None:
    picture = rotation_picture(PLAIN, "plain", positions=(0, 1, 5))
    assert len(picture.rows) == 9
    for row in picture.rows:
        turned = cmath.exp(1j * int(row["position"] or 0) * PLAIN[int(row["pair"] or 0)])
        assert (row["x"], row["y"]) == pytest.approx((turned.real, turned.imag))
    panels = raster(picture.figure).axes
    ends = [(x[1], y[1]) for panel in panels for x, y in data_lines(panel) if len(x) == 2]
    assert ends == [(row["x"], row["y"]) for row in picture.rows]
    assert all(panel.get_aspect() == 1 for panel in panels)


def test_sines_and_cosines_alternate() -> None:
    picture = sinusoid_picture(PLAIN, "plain", positions=16)
    z = np.array(picture.figure.data[0].z)
    assert z.shape == (16, 2 * PAIRS)
    for position, dimension in ((0, 0), (0, 1), (3, 0), (7, 11), (15, 2 * PAIRS - 1)):
        wave = math.cos if dimension % 2 else math.sin
        assert z[position, dimension] == pytest.approx(wave(position * PLAIN[dimension // 2]))
    assert len(picture.rows) == z.size


def test_biases_are_slopes_times_distances() -> None:
    picture = bias_picture(sample("alibi").resolved.recipe, 64, "alibi")
    panels = picture.figure.data
    assert len(panels) == 6
    titles = [note.text for note in picture.figure.layout.annotations]
    assert titles == [f"head {head}" for head in (0, 1, 3, 4, 6, 7)]
    for title, panel in zip(titles, panels, strict=True):
        slope = 2.0 ** (-8 * (int(title.split()[1]) + 1) / HEADS)
        for query, key in ((63, 0), (40, 39), (5, 5)):
            assert panel.z[query][key] == pytest.approx(-slope * (query - key))
        assert panel.z[3][4] is None


def test_effective_distances_stop_where_the_encoding_says() -> None:
    recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
    z = distance_picture(recipe, 64, TRAINED, "rerope").figure.data[0].z
    assert [z[63][key] for key in (63, 60, 50, 30, 0)] == [0, 3, 13, 16, 16]
    assert z[10][11] is None


def test_long_matrices_are_sampled_with_the_first_key_and_the_last_query() -> None:
    recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
    picture = distance_picture(recipe, 5000, TRAINED, "rerope")
    shown = picture.figure.data[0]
    assert len(shown.x) == len(shown.y) <= 128
    assert (shown.x[0], shown.y[-1]) == (0, 4999)
    assert all(query >= key for query, key in zip(shown.y, shown.x, strict=True))


def test_the_first_keys_that_a_window_keeps_are_seen() -> None:
    recipe = parse({"method": "streaming", "sink_tokens": 4, "window": 128}).recipe(GEOMETRY)
    z = distance_picture(recipe, 4096, TRAINED, "streaming").figure.data[0].z
    assert z[-1][0] is not None
    assert z[-1][5] is None


def test_the_last_token_beside_plain_rope() -> None:
    recipe = parse({"method": "rerope", "window": 16}).recipe(GEOMETRY)
    _, plain, moved = distance_picture(recipe, 64, TRAINED, "rerope").figure.data
    assert list(plain.y) == list(plain.x) == list(range(63, -1, -1))
    assert list(moved.y) == [min(distance, 16) for distance in plain.x]


PAIRED = [{"pair": pair, "wavelength_before": 6.0 * pair + 6, "wavelength_after": 6.0 * pair + 6} for pair in range(32)]
STRETCHED = [pair | {"wavelength_after": 4 * pair["wavelength_before"]} for pair in PAIRED]


@pytest.mark.parametrize("name", ["self_extend", "dual_chunk", "streaming", "rerope", "string", "lm_infinite", "dpe"])
def test_an_encoding_that_only_moves_positions_is_drawn_as_distances(name: str) -> None:
    recipe = sample(name).resolved.recipe
    png = encoding_png(PAIRED, TRAINED, f"{name} on tiny", recipe, 64)
    assert png == distance_picture(recipe, 4 * TRAINED, TRAINED, f"{name} on tiny").png()


@pytest.mark.parametrize(("name", "pairs"), [("yarn", STRETCHED), ("self_extend", STRETCHED), ("alibi", PAIRED)])
def test_an_encoding_that_changes_more_is_drawn_as_wavelengths(name: str, pairs: list[dict[str, float]]) -> None:
    recipe = sample(name).resolved.recipe
    png = encoding_png(pairs, TRAINED, name, recipe, 64)
    assert png == frequency_png(pairs, TRAINED, f"{name} at 64 tokens", recipe, 64)


def test_titles_name_the_length() -> None:
    assert of("yarn", 512)["frequencies"].title == "Wavelengths: yarn at 512 tokens"
    assert of("alibi", 512)["score-bias"].title == "Score bias at 512 tokens: alibi"
    assert of("self_extend", 512)["effective-distance"].title == "Effective distance at 512 tokens: self_extend"


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("linear", ["frequencies", "rotation", "sinusoid"]),
        ("self_extend", ["frequencies", "rotation", "sinusoid", "effective-distance"]),
        ("alibi", ["score-bias"]),
        ("none", []),
    ],
)
def test_an_encoding_has_the_pictures_of_what_it_does(name: str, names: list[str]) -> None:
    pictures = of(name, 512)
    assert list(pictures) == names
    for picture in pictures.values():
        assert raster(picture.figure).axes
