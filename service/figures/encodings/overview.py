"""Everything that a figure shows of some encodings on one model, the same figures for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from patches import ResolvedRecipe
from service.figures.encodings.frequencies import wavelengths_figure
from service.figures.encodings.positions import (
    absolute_figure,
    bias_of,
    distance_figure,
    heads_figure,
    multipliers_figure,
    norms_figure,
)
from service.figures.encodings.similarity import similarity_figure
from service.figures.encodings.vectors import drawn_distances
from service.figures.encodings.waves import rotation_figure, sinusoids_figure
from service.figures.looks import looks
from service.figures.picture import Picture

NEAR, FAR = 32, 1 << 16
"""Tokens that the picture of similarity shows one by one, and at most."""
TOKENS = 8
"""Positions of the rotated query."""
COLUMNS = 128
"""Positions of the sinusoidal matrix."""


@dataclass(frozen=True)
class Setting:
    """The model and the length of the pictures: ``inv_freq`` is the model's own.

    ``norms`` [layers, distances] are those of learned relative vectors, by the label of the encoding.
    """

    inv_freq: tuple[float, ...]
    trained_length: int
    length: int
    norms: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)


Encodings = Mapping[str, ResolvedRecipe]


def encoding_pictures(encodings: Encodings, setting: Setting) -> list[Picture]:
    """The pictures of ``encodings`` by their labels: one for all of them where lines share axes, else one each."""
    return [
        *_wavelengths(encodings, setting),
        *_each(encodings, lambda one: one.recipe.moves, _distances, setting),
        *_each(encodings, lambda one: one.recipe.score_bias is not None, _bias, setting),
        *_each(encodings, lambda one: one.recipe.relative is not None, _relative, setting),
        *_each(encodings, lambda one: one.recipe.absolute is not None, _absolute, setting),
        *_temperatures(encodings, setting),
        *_similarity(encodings, setting),
        *_each(encodings, lambda one: one.rotates, _rotation, setting),
        *_sinusoids(setting),
    ]


def _picture(name: str, figure: go.Figure, caption: str) -> Picture:
    title = str(figure.layout.title.text).removeprefix("<b>").removesuffix("</b>")
    return Picture(name, title, figure, [], caption)


def _each(
    encodings: Encodings,
    shown: Callable[[ResolvedRecipe], bool],
    draw: Callable[[str, ResolvedRecipe, Setting], Picture],
    setting: Setting,
) -> list[Picture]:
    return [draw(label, one, setting) for label, one in encodings.items() if shown(one)]


def _wavelengths(encodings: Encodings, setting: Setting) -> list[Picture]:
    rotating = {label: one.inv_freq for label, one in encodings.items() if one.rotates}
    if not rotating or not setting.inv_freq:
        return []
    figure = wavelengths_figure(setting.inv_freq, rotating, setting.trained_length, looks(encodings))
    caption = (
        "A pair above the dashed line makes no full turn within the trained length: longer texts show it new angles."
    )
    return [_picture("wavelengths", figure, caption)]


def _distances(label: str, one: ResolvedRecipe, setting: Setting) -> Picture:
    figure = distance_figure(one.recipe, setting.length, setting.trained_length, label)
    return _picture("distances", figure, "The distance that the rotation shows to the model, instead of the real one.")


def _bias(label: str, one: ResolvedRecipe, setting: Setting) -> Picture:
    terms = bias_of(one.recipe, setting.length)
    figure = heads_figure(*terms, setting.trained_length, f"Bias: {label}", f"the scores of token {setting.length:,}")
    return _picture("bias", figure, "A term that depends on the distance alone takes the place of rotation.")


def _relative(label: str, one: ResolvedRecipe, setting: Setting) -> Picture:
    """The vectors that the loaded model has learned."""
    distance = drawn_distances(setting.length).tolist()
    norms = {f"layer {index}": layer for index, layer in enumerate(setting.norms[label])}
    figure = norms_figure(norms, distance, setting.trained_length, f"Learned vectors of distances: {label}")
    caption = "A query meets one vector per distance, beside the keys: equal norms give distances equal weight."
    return _picture("relative", figure, caption)


def _absolute(label: str, one: ResolvedRecipe, setting: Setting) -> Picture:
    figure = absolute_figure(one.recipe, setting.length, setting.trained_length, f"Positions read: {label}")
    return _picture("positions", figure, "Each token reads one or several rows of the model's own table.")


def _temperatures(encodings: Encodings, setting: Setting) -> list[Picture]:
    having = {label: one.recipe for label, one in encodings.items() if one.recipe.attention_temperature is not None}
    if not having:
        return []
    figure = multipliers_figure(
        having, setting.length, setting.trained_length, "Attention temperature", looks(encodings)
    )
    return [
        _picture("temperature", figure, "All scores of a query are multiplied by it: above 1 attention is sharper.")
    ]


def _similarity(encodings: Encodings, setting: Setting) -> list[Picture]:
    having = {
        label: one
        for label, one in encodings.items()
        if one.rotates and one.recipe.relative is None and one.recipe.absolute is None
    }
    far = min(setting.length, FAR)
    if not having or far < 2 * NEAR:
        return []
    figure = similarity_figure(having, NEAR, far, setting.trained_length, looks(encodings))
    caption = "A query meets an equal key: rotation alone makes the score fall with the distance between them."
    return [_picture("similarity", figure, caption)]


def _rotation(label: str, one: ResolvedRecipe, _: Setting) -> Picture:
    last = len(one.inv_freq) - 1
    figure = rotation_figure(one.inv_freq, TOKENS, sorted({0, last // 4, last // 2}))
    picture = _picture("rotation", figure, "Each pair of coordinates turns at a speed that is constant over positions.")
    return Picture(picture.name, f"{picture.title}: {label}", figure, [], picture.caption)


def _sinusoids(setting: Setting) -> list[Picture]:
    """The matrix of the original Transformer, at the model's own frequencies."""
    if not setting.inv_freq:
        return []
    pairs: Sequence[int] = sorted({math.floor(share * (len(setting.inv_freq) - 1)) for share in (0, 0.25, 0.5, 0.75)})
    figure = sinusoids_figure(setting.inv_freq, COLUMNS, pairs)
    return [_picture("sinusoids", figure, "The original Transformer adds these vectors; rotation uses the same waves.")]
