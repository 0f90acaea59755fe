"""Scores and attention weights that an encoding makes of given vectors: no model, no trained weights.

A rotated pair is one complex number, and a rotation multiplies it (RoFormer, arXiv:2104.09864, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
import torch

from patches import ResolvedRecipe, effective_distance
from service.figures.drawing.axes import category_axis, linear_axis, percent_bar, share_axis, token_axis
from service.figures.drawing.charts import labels, mark_trained, new_figure, room_for
from service.figures.drawing.curves import Curve, add_curves, curve_traces
from service.figures.drawing.panels import Panel, grid, heat_maps
from service.figures.drawing.style import line_style
from service.figures.encodings.positions import HEIGHT, values_of, without_later_keys

SELF_SCORE = 3.0
"""Mean scaled score of a word of ``attention_figure`` with itself; with other words it is near 0."""


def scores(
    resolved: ResolvedRecipe, query: torch.Tensor, key: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
) -> torch.Tensor:
    """Products float64 [q, k] of ``query`` [q, d] and ``key`` [k, d] after rotation, before scaling; NaN: not attended.

    ``q_idx`` int64 [q] and ``kv_idx`` int64 [k] are positions. All d dimensions rotate, in half-split pairs.

    Raises:
        ValueError: for an encoding with weights that a model learns.
    """
    recipe = resolved.recipe
    if recipe.relative is not None or recipe.absolute is not None:
        raise ValueError("this encoding reads weights that a model learns: without them it has no scores")
    distance = effective_distance(recipe, q_idx, kv_idx)
    if not resolved.rotates:
        return torch.where(distance[..., 0].isnan(), torch.nan, query.double() @ key.double().T)
    angles = distance * torch.tensor(resolved.inv_freq, dtype=torch.float64)
    turned = torch.polar(torch.full_like(angles, resolved.attention_factor**2), angles)
    pairs_q, pairs_k = (torch.complex(*states.double().chunk(2, dim=-1)) for states in (query, key))
    return (pairs_q[:, None] * pairs_k[None].conj() * turned).sum(-1).real


def weights(resolved: ResolvedRecipe, query: torch.Tensor, key: torch.Tensor, head: int = 0) -> torch.Tensor:
    """Softmax weights float64 [n, n] of ``query`` and ``key`` [n, d] at positions 0 .. n - 1, in ``head``.

    Raises:
        ValueError: as ``scores``.
    """
    recipe, tokens = resolved.recipe, torch.arange(len(query))
    scaled = scores(resolved, query, key, tokens, tokens) * query.shape[-1] ** -0.5
    if recipe.attention_temperature is not None:
        scaled = scaled * recipe.attention_temperature(tokens)[:, None]
    if recipe.score_bias is not None:
        scaled = scaled + recipe.score_bias(tokens[:, None], tokens[None])[head]
    shares: torch.Tensor = scaled.masked_fill(scaled.isnan(), -torch.inf).softmax(-1)
    return shares


def similarity(resolved: ResolvedRecipe, distance: torch.Tensor, position: int) -> torch.Tensor:
    """Score float64 [n] of the query at ``position`` with an equal key at each ``distance`` int64 [n].

    It is a share of the score without rotation; NaN: not attended. All pairs weigh alike: the result is the mean cosine
    of their angles, times the squared attention factor.

    Raises:
        ValueError: for an encoding without rotation.
    """
    if not resolved.rotates:
        raise ValueError("this encoding rotates nothing: all distances are alike")
    alike = torch.ones(1, 2 * len(resolved.inv_freq))
    keys = alike.expand(len(distance), -1)
    return scores(resolved, alike, keys, torch.tensor([position]), position - distance)[0] / alike.sum()


def similarity_figure(
    encodings: Mapping[str, ResolvedRecipe],
    near: int,
    far: int,
    trained_length: int,
    looks: Mapping[str, int] | None = None,
) -> go.Figure:
    """Similarity by distance, one line per encoding: to ``near`` tokens, and means of ``near`` tokens up to ``far``."""
    titles = [f"up to {near} tokens", f"up to {far:,} tokens, means of {near}"]
    texts = "Similarity of a query and an equal key", "share of their product without rotation"
    figure = grid(titles, texts, columns=2, panel_height=HEIGHT, right=room_for(list(encodings), 76))
    labels_of = labels(encodings)
    stretches = torch.arange(far // near * near).unflatten(0, (-1, near))
    low, high = 0.0, 1.0
    for index, (name, resolved) in enumerate(encodings.items()):
        by_distance = similarity(resolved, stretches.flatten(), far)
        means = by_distance.unflatten(0, stretches.shape).nanmean(-1)
        panels = (stretches[0], by_distance[:near]), (stretches.double().mean(-1), means)
        for column, (x, y) in enumerate(panels, start=1):
            curve = Curve(name, x.tolist(), values_of(y))
            low, high = min(low, *curve.known), max(high, *curve.known)
            style = line_style((looks or {}).get(name, index))
            (line,) = curve_traces(curve, style, str(index), text=labels_of[name])
            figure.add_trace(line.update(mode="lines", showlegend=column == 1), row=1, col=column)
    figure.update_layout(showlegend=True)
    figure.update_yaxes(**linear_axis("similarity", low, 1.05 * high))
    figure.update_yaxes(title_text="", showticklabels=False, row=1, col=2)
    figure.update_xaxes(**linear_axis("distance between tokens", 0, near), row=1, col=1)
    x_axis = linear_axis("distance between tokens", 0, far)
    figure.update_xaxes(**x_axis, row=1, col=2)
    mark_trained(figure, trained_length, x_axis, named=False, row=1, col=2)
    return figure


def attention_figure(
    encodings: Mapping[str, ResolvedRecipe], words: Sequence[str], width: int, head: int = 0
) -> go.Figure:
    """Attention weights of every word to itself and earlier ones, one matrix per encoding.

    Each different word has a random vector of ``width`` dimensions, which is both its query and its key. So all that
    the matrices show is due to the words and the encoding.
    """
    texts = "Attention with and without positions", "weights in %: each row sums to 100; equal words have equal vectors"
    places = list(range(len(words)))
    states = word_vectors(words, width)
    panels = []
    for name, resolved in encodings.items():
        matrix = without_later_keys(weights(resolved, states, states, head))
        z = [values_of(row) for row in matrix]
        shown = [["" if weight is None else f"{100 * weight:.0f}" for weight in row] for row in z]
        panels.append(Panel(name, places, places, z, shown))
    axes = category_axis("key", words) | {"tickangle": -90}, category_axis("query", words, reverse=True)
    bar = percent_bar("weight")
    return heat_maps(panels, texts, axes, {"cmin": 0, "cmax": 1, "colorbar": bar}, panel_height=300)


def word_vectors(words: Sequence[str], width: int) -> torch.Tensor:
    """Random vectors float64 [words, width], the same for equal words and in every run."""
    random = np.random.default_rng(0)  # torch's numbers depend on its version and on the processor
    known = {word: torch.from_numpy(random.standard_normal(width)) for word in dict.fromkeys(words)}
    # A word's product with itself is then SELF_SCORE x sqrt(width) on average.
    size: float = SELF_SCORE**0.5 * width**-0.25
    return size * torch.stack([known[word] for word in words])


def focus(resolved: ResolvedRecipe, lead: float, keys: torch.Tensor) -> torch.Tensor:
    """Weight float64 [n] of one key whose score is ``lead`` above that of all others, among ``keys`` int64 [n].

    The query is the last of the keys. Only the attention temperature of an encoding has an effect.
    """
    temperature = resolved.recipe.attention_temperature
    multiplier = torch.ones(len(keys)) if temperature is None else temperature(keys - 1)
    return torch.sigmoid(multiplier.double() * lead - (keys - 1).double().log())


def focus_figure(encodings: Mapping[str, ResolvedRecipe], lead: float, length: int, trained_length: int) -> go.Figure:
    """Weight of one leading key by the number of keys up to ``length``, one line per encoding."""
    keys = [1 << power for power in range(3, length.bit_length())]
    subtitle = f"weight of one key whose score is {lead:g} above the others"
    figure = new_figure("Attention thins out with length", subtitle)
    x = token_axis("keys", keys, trained_length)
    figure.update_layout(xaxis=x, yaxis=share_axis("weight of that key"))
    weight = {name: focus(resolved, lead, torch.tensor(keys)).tolist() for name, resolved in encodings.items()}
    add_curves(figure, [Curve(name, keys, values) for name, values in weight.items()])
    mark_trained(figure, trained_length, x)
    return figure
