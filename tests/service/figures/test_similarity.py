"""Pictures that explain encodings: scores, weights, waves and rotations against other code and written-out formulas."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from patches import ResolvedRecipe, from_text, parse, resolve
from patches.attention import reference
from patches.attention.layer import Layer
from service.figures.drawing.raster import raster
from service.figures.encodings.frequencies import wavelengths_figure
from service.figures.encodings.positions import bias_matrices_figure
from service.figures.encodings.samples import GEOMETRY, HEADS, PAIRS, TRAINED, plain, sample
from service.figures.encodings.similarity import (
    attention_figure,
    focus,
    focus_figure,
    similarity,
    similarity_figure,
    weights,
    word_vectors,
)
from service.figures.encodings.waves import APART, rotation_figure, sinusoids, sinusoids_figure
from service.models.architecture import sinusoid
from tests.patches.forward import written

LENGTH = 24
SEVERAL = (
    "default",
    "yarn:4",
    "alibi",
    "none:attention_temperature=1.5",
    "self_extend:group_size=3,neighbor_window=4",
    "streaming:sink_tokens=2,window=5",
    '{"method": "dpe", "group_factors": [2, 8, 2, 8, 32, 32, 32, 4], "neighbor_window": 4}',
)


def resolved(text: str) -> ResolvedRecipe:
    return resolve(parse(from_text(text)), GEOMETRY, LENGTH)


@pytest.mark.parametrize("text", SEVERAL)
@pytest.mark.parametrize("head", [0, HEADS - 1])
def test_weights_are_those_of_the_reference_attention(text: str, head: int) -> None:
    encoding = resolved(text)
    torch.manual_seed(0)
    query, key = (torch.randn(LENGTH, 2 * PAIRS, dtype=torch.float64) for _ in range(2))
    given = [states.expand(1, HEADS, -1, -1) for states in (query, key)]
    given = [written(states, encoding) for states in given]
    layer = Layer(scaling=(2 * PAIRS) ** -0.5)
    expected = reference.weights(*given, encoding, layer, q_start=0)[0, head]
    assert torch.allclose(weights(encoding, query, key, head), expected.double(), atol=1e-5)


def test_encodings_with_learned_weights_have_no_scores_here() -> None:
    with pytest.raises(ValueError, match="weights that a model learns"):
        weights(sample("shaw").resolved, torch.ones(2, 64), torch.ones(2, 64))
    with pytest.raises(ValueError, match="rotates nothing"):
        similarity(sample("none").resolved, torch.arange(2), 4)


@pytest.mark.parametrize("distance", [0, 1, 63, 300])
def test_similarity_is_the_mean_cosine(distance: int) -> None:
    expected = sum(math.cos(distance * 10_000 ** (-pair / PAIRS)) for pair in range(PAIRS)) / PAIRS
    assert similarity(plain(), torch.tensor([distance]), 512)[0] == pytest.approx(expected, abs=1e-5)
    stretched = similarity(resolved("linear:4"), torch.tensor([4 * distance]), 2048)[0]
    assert stretched == pytest.approx(expected, abs=1e-5)
    table = sinusoids(plain().inv_freq, 301)
    assert table[300] @ table[300 - distance] / PAIRS == pytest.approx(expected, abs=1e-5)


def test_similarity_of_masked_keys_is_unknown() -> None:
    seen = similarity(resolved("streaming:sink_tokens=2,window=5"), torch.tensor([0, 4, 10, 20]), 20)
    assert seen.isnan().tolist() == [False, False, True, False]


def test_similarity_is_drawn_near_and_far() -> None:
    figure = similarity_figure({"a": plain(), "b": resolved("yarn:4")}, near=8, far=32, trained_length=16)
    near, far = figure.data[:2]
    assert list(near.x) == list(range(8))
    assert list(near.y) == pytest.approx(similarity(plain(), torch.arange(8), 32).tolist())
    assert list(far.x) == [3.5, 11.5, 19.5, 27.5]
    assert far.y[0] == pytest.approx(sum(near.y) / 8)
    assert figure.layout.yaxis.range[1] > figure.data[2].y[0] > 1.2  # YaRN's temperature


def test_sinusoids_are_the_demo_models() -> None:
    made = sinusoids([10_000.0 ** (-2 * i / 32) for i in range(16)], 50)
    assert torch.allclose(made, sinusoid(50, 32).double(), atol=1e-4)
    figure = sinusoids_figure(plain().inv_freq, 50, (0, 8))
    cells, *waves = figure.data
    assert len(cells.z) == 2 * PAIRS
    assert [wave.y[3] for wave in waves] == pytest.approx([math.sin(3.0), math.sin(0.3) - APART])
    names = [note for note in figure.layout.annotations if note.text.startswith("pair")]
    assert [(note.xref, note.x, note.xanchor, note.y) for note in names] == [
        ("x2", -0.5, "left", 1.0),
        ("x2", -0.5, "left", 1.0 - APART),
    ], "beside the axis they lay on the heat map"
    assert set(figure.layout.yaxis2.ticktext) == {""}


def test_a_query_turns_by_its_frequency() -> None:
    figure = rotation_figure(plain().inv_freq, tokens=3, pairs=(0, 8))
    expected = [cmath.exp(1j * position * frequency) for frequency in (1.0, 0.1) for position in range(3)]
    circle, turned, still = figure.data[3:]
    drawn = [complex(x, y) for arrow in (still, turned) for x, y in zip(arrow.x, arrow.y, strict=True) if x]
    assert drawn == pytest.approx(expected[3:])
    assert [abs(complex(x, y)) for x, y in zip(circle.x, circle.y, strict=True)] == pytest.approx([1.0] * 121)
    notes = [note.text for note in figure.layout.annotations][2:]
    assert notes == ["0", "1", "2", "0", "2"], "labels do not overlap"
    assert figure.layout.annotations[1].text == "pair 8: a turn in 62.8 tokens"
    assert rotation_figure([0.0], tokens=2, pairs=(0,)).layout.annotations[0].text == "pair 0: no rotation"


def test_attention_of_equal_words_differs_by_position_only() -> None:
    words = ["a", "b", "a"]
    states = word_vectors(words, 64)
    assert states[0].equal(states[2])
    none, rope = attention_figure({"none": sample("none").resolved, "rope": plain()}, words, 64).data
    assert none.z[2][0] == pytest.approx(none.z[2][2])
    assert rope.z[2][0] < rope.z[2][2]
    assert list(none.z[0]) == [1.0, None, None]
    assert list(none.text[0]) == ["100", "", ""]
    assert all(sum(value or 0 for value in row) == pytest.approx(1.0) for row in (*none.z, *rope.z))


def test_names_of_keys_are_turned() -> None:
    (axes, _) = raster(attention_figure({"rope": plain()}, ["left", "right"], 64)).axes
    assert [label.get_rotation() for label in axes.get_xticklabels()] == [90.0, 90.0]
    assert [label.get_rotation() for label in axes.get_yticklabels()] == [0.0, 0.0]


def test_bias_matrices() -> None:
    recipe = sample("alibi").resolved.recipe
    (cells,) = bias_matrices_figure({"alibi": recipe}, head=1, length=8, floor=-1.0).data
    assert cells.z[7][3] == -1.0
    assert cells.z[3][7] is None
    with pytest.raises(ValueError, match="plain adds no bias"):
        bias_matrices_figure({"plain": plain().recipe}, 0, 8, -1.0)


def test_wavelengths_before_and_after() -> None:
    after = {"linear": resolved("linear:4").inv_freq, "still": [0.0] * PAIRS}
    before, linear, still = wavelengths_figure(plain().inv_freq, after, TRAINED).data
    assert before.y[0] == pytest.approx(2 * math.pi)
    assert [b / a for a, b in zip(before.y, linear.y, strict=True)] == pytest.approx([4.0] * PAIRS)
    assert set(still.y) == {None}


@pytest.mark.parametrize(("trained", "corner"), [(20, ("right", "top")), (10_000, ("left", "bottom"))])
def test_the_name_of_the_trained_length_is_where_no_curve_is(trained: int, corner: tuple[str, str]) -> None:
    (name,) = wavelengths_figure(plain().inv_freq, {}, trained).layout.annotations
    assert (name.xanchor, name.yanchor) == corner


def test_one_key_among_many() -> None:
    none, drope = sample("none").resolved, sample("drope").resolved
    assert focus(none, 6.0, torch.tensor([64]))[0] == pytest.approx(math.exp(6) / (math.exp(6) + 63))
    sharper = math.exp(6 * (1 + 0.41 * math.log(4)))
    assert focus(drope, 6.0, torch.tensor([1024]))[0] == pytest.approx(sharper / (sharper + 1023), rel=1e-5)
    lines = focus_figure({"none": none, "drope": drope}, 6.0, 1024, TRAINED).data
    assert list(lines[0].x) == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert lines[0].y[3] == pytest.approx(math.exp(6) / (math.exp(6) + 63))
