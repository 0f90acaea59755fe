"""Distances, biases, positions and multipliers of scores that an encoding makes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import torch

from patches import Recipe, effective_distance
from service.figures.drawing.axes import linear_axis
from service.figures.drawing.charts import NOTE, mark_trained, mark_trained_height, new_figure
from service.figures.drawing.curves import Curve, add_curves, curve_traces
from service.figures.drawing.panels import SEQUENTIAL, Panel, grid, heat_maps
from service.figures.drawing.style import line_style

POINTS = 256
CELLS = 128
"""Cells of a matrix each way, at most."""
PLAIN = {"color": "#b5b5b5", "width": 4}
HEIGHT = 400


def distance_figure(recipe: Recipe, length: int, trained_length: int, name: str) -> go.Figure:
    """Effective distance of every query and key, and of the last token to each key.

    Every query and key: the slowest pair, empty for keys that are not attended. The last token: one line per group of
    pairs that differ.
    """
    every = -(-length // CELLS)
    keys = torch.arange(0, length, every)  # includes the first keys, which masks keep
    queries = (keys + every - 1).clamp(max=length - 1)
    distance = effective_distance(recipe, queries, keys)[..., -1]
    title = f"Effective distance at {length:,} tokens: {name}"
    subtitle = "empty: not attended; colours end at the trained length"
    titles = ["every query and key", "the last token, grey: plain RoPE"]
    figure = grid(titles, (title, subtitle), columns=2, panel_height=HEIGHT, right=120, spacing=0.14)
    z = [values_of(row) for row in distance]
    cells = go.Heatmap(x=keys.tolist(), y=queries.tolist(), z=z, coloraxis="coloraxis", hoverongaps=False)
    figure.add_trace(cells, row=1, col=1)
    figure.update_xaxes(**linear_axis("key", -every / 2, length + every / 2), row=1, col=1)
    figure.update_yaxes(**linear_axis("query", length + every / 2, -every / 2), row=1, col=1)
    add_last_token(figure, recipe, length, trained_length, row=1, col=2)
    bar = {"cmin": 0, "cmax": trained_length, "colorbar": {"title": {"text": "tokens"}}}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, **bar})
    return figure


def add_last_token(figure: go.Figure, recipe: Recipe, length: int, trained_length: int, **panel: int) -> None:
    """Effective distance from the last of ``length`` tokens to each key by real distance; gaps are not attended."""
    keys = torch.linspace(0, length - 1, min(length, POINTS)).round().long()
    real = (length - 1 - keys).tolist()
    distance = effective_distance(recipe, torch.tensor([length - 1]), keys)[0]
    figure.add_scatter(x=real, y=real, mode="lines", line=PLAIN, name="plain RoPE", showlegend=False, **panel)
    for index, column in enumerate(different_columns(distance)):
        style = line_style(index)
        alone = column.isnan().any()  # a few keys between gaps make no line
        figure.add_scatter(
            x=real, y=values_of(column), mode="lines+markers" if alone else "lines", name="effective",
            line={"color": style.colour, "dash": style.dash, "width": 2}, marker={"size": 4, "color": style.colour},
            showlegend=False, **panel,
        )  # fmt: skip
    top = max(1.25 * trained_length, 1.05 * float(distance.nan_to_num(0.0).max()))
    y = linear_axis("effective distance, tokens", 0, top)
    figure.update_xaxes(**linear_axis("distance between tokens", 0, 1.03 * length), **panel)
    figure.update_yaxes(**y, **panel)
    mark_trained_height(figure, trained_length, y, right=True, below=False, **panel)


def different_columns(distance: torch.Tensor) -> list[torch.Tensor]:
    """The columns of [keys, 1 or pairs] that differ, in order."""
    found: list[torch.Tensor] = []
    for column in distance.T:
        if not any(torch.equal(column.nan_to_num(-1.0), other.nan_to_num(-1.0)) for other in found):
            found.append(column)
    return found


def bias_of(recipe: Recipe, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias [heads, distances] on the scores of the last of ``length`` tokens, and the distances."""
    assert recipe.score_bias is not None
    distance = torch.linspace(0, length - 1, min(length, POINTS)).round().long()
    return recipe.score_bias(torch.tensor([[length - 1]]), length - 1 - distance[None])[:, 0], distance


def add_heads(
    figure: go.Figure, by_head: torch.Tensor, distance: torch.Tensor, trained_length: int, **panel: int
) -> None:
    """Terms [heads, distances] of the scores, one line per head."""
    for index, head in enumerate(by_head):
        (line,) = curve_traces(Curve(f"head {index}", distance.tolist(), head.tolist()), line_style(index), str(index))
        figure.add_trace(line.update(mode="lines", showlegend=False), **panel)
    x = linear_axis("distance between tokens", 0, int(distance[-1]) + 1)
    figure.update_xaxes(**x, **panel)
    low, high = by_head.min().item(), by_head.max().item()
    margin = 0.05 * (high - low) or 0.1
    figure.update_yaxes(**linear_axis("added, per head", low - margin, high + margin), **panel)
    mark_trained(figure, trained_length, x, named=True, **panel)


def heads_figure(by_head: torch.Tensor, distance: torch.Tensor, trained_length: int, title: str, of: str) -> go.Figure:
    """Terms [heads, distances] that are added to the scores ``of`` a query."""
    figure = new_figure(title, f"added to {of}; one line per head", height=HEIGHT)
    add_heads(figure, by_head, distance, trained_length)
    return figure


def norms_figure(
    norms: Mapping[str, Sequence[float]], distance: Sequence[int], trained_length: int, title: str
) -> go.Figure:
    """Norms of learned vectors by distance, one line per name."""
    figure = new_figure(title, "norm of the vector beside the keys at each distance, mean of the heads", height=HEIGHT)
    x = linear_axis("distance between tokens", 0, distance[-1] + 1)
    most = max(max(values) for values in norms.values())
    figure.update_layout(xaxis=x, yaxis=linear_axis("norm", 0, 1.1 * most), showlegend=True)
    add_curves(figure, [Curve(name, distance, values) for name, values in norms.items()])
    mark_trained(figure, trained_length, x)
    return figure


def bias_matrices_figure(recipes: Mapping[str, Recipe], head: int, length: int, floor: float) -> go.Figure:
    """Biases of one head on every query and key of ``length`` tokens, a matrix per recipe; colours end at ``floor``.

    Raises:
        ValueError: for a recipe without a bias.
    """
    tokens = torch.arange(length)
    panels = []
    for name, recipe in recipes.items():
        if recipe.score_bias is None:
            raise ValueError(f"{name} adds no bias to the scores")
        matrix = without_later_keys(recipe.score_bias(tokens[:, None], tokens[None])[head])
        panels.append(Panel(name, tokens.tolist(), tokens.tolist(), [values_of(row) for row in matrix]))
    subtitle = f"added to the scores of head {head + 1}; empty: not attended; colours end at {floor:g}"
    axes = linear_axis("key", -0.5, length - 0.5), linear_axis("query", length - 0.5, -0.5)
    bar = {"cmin": floor, "cmax": 0.0, "colorbar": {"title": {"text": "bias"}}}
    return heat_maps(panels, ("Biases of all queries and keys", subtitle), axes, bar, panel_height=300)


def without_later_keys(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` [n, n] of queries and keys with NaN above the diagonal."""
    return matrix.masked_fill(torch.ones_like(matrix, dtype=torch.bool).triu(1), torch.nan)


def absolute_figure(recipe: Recipe, length: int, trained_length: int, title: str) -> go.Figure:
    """Position of the model's position embeddings that each token reads, one line per weight."""
    tokens = torch.arange(length)
    weights, positions = (
        (torch.ones(length, 1), tokens[:, None]) if recipe.absolute is None else recipe.absolute(tokens)
    )
    figure = new_figure(title, "position of the model's own embedding that each token reads", height=HEIGHT)
    read = torch.where(weights != 0, positions, torch.nan)
    y = linear_axis("position read", 0, 1.25 * max(trained_length, float(positions.max())))
    end = max(length, 2 * trained_length)
    figure.update_layout(xaxis=linear_axis("position of the token", 0, end), yaxis=y, showlegend=True)
    names = [f"weight {weight:.3g}" for weight in weights[-1]]
    columns = [values_of(column) for column in read.T]
    add_curves(figure, [Curve(name, tokens.tolist(), y) for name, y in zip(names, columns, strict=True)])
    mark_trained_height(figure, trained_length, y, right=True, below=False)
    if length == trained_length:
        figure.add_vrect(x0=length, x1=end, fillcolor="#000000", opacity=0.06, line_width=0, layer="below")
        figure.add_annotation(x=1.5 * length, y=trained_length / 2, text="refused", **NOTE)
    return figure


def multipliers_figure(
    recipes: Mapping[str, Recipe],
    length: int,
    trained_length: int,
    title: str,
    looks: Mapping[str, int] | None = None,
) -> go.Figure:
    """Attention temperature by position: the multiplier of the scores of each query, one line per recipe."""
    queries = torch.arange(length)
    curves = []
    for label, recipe in recipes.items():
        temperature = recipe.attention_temperature
        multiplier = torch.ones(length) if temperature is None else temperature(queries)
        curves.append(Curve(label, queries.tolist(), multiplier.tolist()))
    figure = new_figure(title, f"multiplier of the scores by the query's position, {length:,} tokens", height=HEIGHT)
    x = linear_axis("position of the query", 0, length)
    most = max(value for curve in curves for value in curve.known)
    figure.update_layout(xaxis=x, yaxis=linear_axis("scores multiplied by", 0.9, 1.05 * most))
    add_curves(figure, curves, looks=looks)
    mark_trained(figure, trained_length, x)
    return figure


def values_of(tensor: torch.Tensor) -> list[float | None]:
    """The numbers of a vector, None for NaN."""
    return [None if math.isnan(value) else value for value in tensor.tolist()]
