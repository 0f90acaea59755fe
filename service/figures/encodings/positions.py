"""Where an encoding puts tokens, drawn into axes: distances, biases, embeddings, multipliers of scores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.axes import Axes

from patches import Recipe, effective_distance
from service.figures.drawing.style import FAINT, INK, line_style

POINTS = 256
PLAIN, PLAIN_WIDTH = "#b5b5b5", 4


def draw_distance(axes: Axes, recipe: Recipe, length: int, trained_length: int) -> None:
    """How far each key is from the last of ``length`` tokens, by how far it really is; gaps are not attended."""
    keys = torch.linspace(0, length - 1, min(length, POINTS)).round().long()
    real = (length - 1 - keys).tolist()
    distance = effective_distance(recipe, torch.tensor([length - 1]), keys)[0]
    alone = "." if distance.isnan().any() else ""  # a few keys between gaps make no line
    axes.plot(real, real, color=PLAIN, lw=PLAIN_WIDTH, label="plain RoPE")
    for index, column in enumerate(different_columns(distance)):
        style, label = line_style(index), "" if index else "effective"
        axes.plot(real, column.tolist(), color=style.colour, ls=style.dash[0], marker=alone, ms=4, lw=1.8, label=label)
    axes.set_xlim(0, length)
    axes.set_ylim(0, max(1.25 * trained_length, 1.05 * float(distance.nan_to_num(0.0).max())))
    _mark_trained_below(axes, trained_length)
    axes.set_xlabel("distance between tokens", color=INK)
    axes.set_ylabel("effective distance", color=INK)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=2, fontsize=9)


def different_columns(distance: torch.Tensor) -> list[torch.Tensor]:
    """The columns of [keys, 1 or pairs] that differ, in order."""
    found: list[torch.Tensor] = []
    for column in distance.T:
        if not any(torch.equal(column.nan_to_num(-1.0), other.nan_to_num(-1.0)) for other in found):
            found.append(column)
    return found


def draw_matrix(axes: Axes, recipe: Recipe, length: int, trained_length: int) -> None:
    """Effective distance of every (query, key), white where not attended; at most 256 of them each way."""
    every = max(1, length // 256)
    keys = torch.arange(0, length, every)
    distance = effective_distance(recipe, keys + every - 1, keys)[..., -1]
    image = axes.imshow(
        distance.numpy(),
        extent=(0, length, length, 0),
        cmap="viridis_r",
        vmin=0,
        vmax=trained_length,
        interpolation="nearest",
    )
    axes.grid(visible=False)
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query", color=INK)
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, extend="max", fraction=0.046, pad=0.04)
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.outline.set_visible(False)


def draw_bias(axes: Axes, recipe: Recipe, length: int, trained_length: int) -> None:
    """What is added to the scores of the last of ``length`` tokens, one line per head."""
    assert recipe.score_bias is not None
    distance = torch.linspace(0, length - 1, min(length, POINTS)).round().long()
    bias = recipe.score_bias(torch.tensor([[length - 1]]), length - 1 - distance[None])[:, 0]
    draw_heads(axes, bias, distance, trained_length)


def draw_heads(axes: Axes, by_head: torch.Tensor, distance: torch.Tensor, trained_length: int) -> None:
    """Values [heads, distances], one line per head."""
    for index, head in enumerate(by_head):
        style = line_style(index)
        axes.plot(distance.tolist(), head.tolist(), color=style.colour, ls=style.dash[0], lw=1.5)
    axes.set_xlim(0, int(distance[-1]) + 1)
    _mark_trained_at(axes, trained_length)
    axes.set_xlabel("distance between tokens", color=INK)
    axes.set_ylabel("added, per head", color=INK)


def draw_absolute(axes: Axes, recipe: Recipe, length: int, trained_length: int) -> None:
    """Which positions of the model's own embedding each token reads, one line per weight."""
    tokens = torch.arange(length)
    weights, positions = (
        (torch.ones(length, 1), tokens[:, None]) if recipe.absolute is None else recipe.absolute(tokens)
    )
    for index in range(weights.shape[1]):
        read = torch.where(weights[:, index] != 0, positions[:, index], torch.nan)
        style = line_style(index)
        label = f"weight {weights[-1, index]:.3g}"
        axes.plot(tokens.tolist(), read.tolist(), color=style.colour, ls=style.dash[0], lw=1.8, label=label)
    axes.set_xlim(0, max(length, 2 * trained_length))
    axes.set_ylim(0, 1.25 * max(trained_length, float(positions.max())))
    if length == trained_length:
        axes.axvspan(length, 2 * length, color="black", alpha=0.06, lw=0)
        axes.text(1.5 * length, trained_length / 2, "refused", ha="center", color=FAINT)
    _mark_trained_below(axes, trained_length)
    axes.set_xlabel("position of the token", color=INK)
    axes.set_ylabel("position read", color=INK)
    axes.legend(frameon=False, loc="lower right", fontsize=9)


def draw_multipliers(axes: Axes, recipes: Mapping[str, Recipe], length: int, trained_length: int) -> None:
    """What the scores of each query are multiplied by, one line per recipe."""
    queries = torch.arange(length)
    for index, (label, recipe) in enumerate(recipes.items()):
        temperature = recipe.attention_temperature
        multiplier = torch.ones(length) if temperature is None else temperature(queries)
        style = line_style(index)
        axes.plot(queries.tolist(), multiplier.tolist(), color=style.colour, ls=style.dash[0], lw=1.8, label=label)
    axes.set_xlim(0, length)
    axes.set_ylim(bottom=0.9)
    _mark_trained_at(axes, trained_length)
    axes.set_xlabel("position of the query", color=INK)
    axes.set_ylabel("scores multiplied by", color=INK)


def _mark_trained_below(axes: Axes, trained_length: int) -> None:
    """A dashed line at the height of the trained length, and a shade above it."""
    axes.axhline(trained_length, color=FAINT, lw=1.2, dashes=(5, 3), zorder=1)
    axes.axhspan(trained_length, axes.get_ylim()[1], color="black", alpha=0.035, lw=0, zorder=0)
    axes.text(
        0.99,
        trained_length,
        "trained length ",
        transform=axes.get_yaxis_transform(),
        size=8,
        color=FAINT,
        ha="right",
        va="bottom",
    )


def _mark_trained_at(axes: Axes, trained_length: int) -> None:
    """A dashed line across the trained length."""
    axes.axvline(trained_length, color=FAINT, lw=1.2, dashes=(5, 3), zorder=1)
    axes.text(trained_length, 1.02, "trained length", transform=axes.get_xaxis_transform(), size=8, color=FAINT)
