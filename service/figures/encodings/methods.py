"""One picture per method for the documentation: what it does to frequencies, distances, scores or embeddings."""

from __future__ import annotations

import io
from collections.abc import Mapping
from types import SimpleNamespace

import matplotlib
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from torch import nn

from patches import Recipe
from service.figures.drawing.style import plain_axes, write_titles
from service.figures.encodings.frequencies import frequency_figure, wavelength
from service.figures.encodings.positions import (
    draw_absolute,
    draw_bias,
    draw_distance,
    draw_heads,
    draw_matrix,
    draw_multipliers,
)
from service.figures.encodings.samples import HEADS, PAIRS, TIMES_LONGER, TRAINED, Sample, plain
from service.models.architecture import RELATIVE

ONE_PANEL = (0.1, 0.15, 0.86, 0.62)
BESIDE_A_LEGEND = (0.1, 0.15, 0.6, 0.62)
TWO_PANELS = (0.07, 0.15, 0.33, 0.62), (0.57, 0.15, 0.4, 0.62)


def method_figure(drawn: Sample, title: str) -> Figure:
    """The panels that show what the method changes."""
    recipe, sizes = drawn.resolved.recipe, (drawn.length, TRAINED)
    if drawn.group == "frequency schedule":
        pairs = [
            {"pair": index, "wavelength_before": wavelength(before), "wavelength_after": wavelength(after)}
            for index, (before, after) in enumerate(zip(plain().inv_freq, drawn.resolved.inv_freq, strict=True))
        ]
        return frequency_figure(pairs, TRAINED, title)
    if drawn.group in ("position map", "mask"):
        figure = _figure(title, f"{drawn.length:,} tokens, {TRAINED} trained; left: effective distance, white: none")
        draw_matrix(plain_axes(figure, TWO_PANELS[0]), recipe, *sizes)
        draw_distance(plain_axes(figure, TWO_PANELS[1]), recipe, *sizes)
        return figure
    if drawn.group == "bias":
        figure = _figure(title, f"added to the scores of token {drawn.length:,}, {TRAINED} trained; one line per head")
        draw_bias(plain_axes(figure, ONE_PANEL), recipe, *sizes)
    elif drawn.group == "relative vectors":
        figure = _figure(title, "added to q . k by the demo model's layers, random weights; one line per head")
        distance = torch.arange(0, drawn.length, TIMES_LONGER)
        draw_heads(plain_axes(figure, ONE_PANEL), _relative_scores(drawn, distance), distance, TRAINED)
    elif drawn.group == "absolute":
        figure = _figure(title, f"which of its own position embeddings the model adds, {TRAINED} trained")
        draw_absolute(plain_axes(figure, ONE_PANEL), recipe, *sizes)
    else:
        figure = _figure(title, f"no rotation, no bias; what is left is a multiplier of the scores, {TRAINED} trained")
        draw_multipliers(plain_axes(figure, ONE_PANEL), {title: recipe}, *sizes)
    return figure


def multipliers_figure(recipes: Mapping[str, Recipe], length: int, title: str) -> Figure:
    """Several attention temperatures, one line each."""
    figure = _figure(title, f"multiplier of the scores by the query's position, {length:,} tokens, {TRAINED} trained")
    axes = plain_axes(figure, BESIDE_A_LEGEND)
    draw_multipliers(axes, recipes, length, TRAINED)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9)
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG, the same text for the same figure. Not for threads: it sets matplotlib's own settings."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "ropeway", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _relative_scores(drawn: Sample, distance: torch.Tensor) -> torch.Tensor:
    """Scores [heads, distances] of one random query, with the weights that a demo model begins with."""
    relative = drawn.resolved.recipe.relative
    assert relative is not None
    shape = SimpleNamespace(num_attention_heads=HEADS, hidden_size=HEADS * 2 * PAIRS, head_dim=2 * PAIRS)
    attention = nn.Module()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        attention.relative = RELATIVE[drawn.name](shape)
        query = torch.randn(1, HEADS, 1, 2 * PAIRS)
        key = torch.zeros(1, HEADS, len(distance), 2 * PAIRS)
        return relative(attention, query, key, distance[None])[0, :, 0]


def _figure(title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(8, 3.6), dpi=150, facecolor="white")
    write_titles(figure, title, subtitle)
    return figure
