"""One picture per method for the documentation: its change of frequencies, distances, scores or embeddings."""

from __future__ import annotations

from types import SimpleNamespace

import plotly.graph_objects as go
import torch
from torch import nn

from service.figures.encodings.frequencies import frequency_figure, wavelength
from service.figures.encodings.positions import (
    absolute_figure,
    bias_of,
    distance_figure,
    heads_figure,
    multipliers_figure,
)
from service.figures.encodings.samples import HEADS, PAIRS, TIMES_LONGER, TRAINED, Sample, plain
from service.models.architecture import RELATIVE


def method_figure(drawn: Sample, title: str) -> go.Figure:
    """The panels that show the changes of a method."""
    recipe, length = drawn.resolved.recipe, drawn.length
    if drawn.group == "frequency schedule":
        pairs = [
            {"pair": index, "wavelength_before": wavelength(before), "wavelength_after": wavelength(after)}
            for index, (before, after) in enumerate(zip(plain().inv_freq, drawn.resolved.inv_freq, strict=True))
        ]
        return frequency_figure(pairs, TRAINED, title)
    if drawn.group in ("position map", "mask"):
        return distance_figure(recipe, length, TRAINED, title)
    if drawn.group == "bias":
        return heads_figure(*bias_of(recipe, length), TRAINED, title, f"the scores of token {length:,}")
    if drawn.group == "relative vectors":
        distance = torch.arange(0, length, TIMES_LONGER)
        of = "q . k by the demo model's layers, random weights"
        return heads_figure(_relative_scores(drawn, distance), distance, TRAINED, title, of)
    if drawn.group == "absolute":
        return absolute_figure(recipe, length, TRAINED, title)
    return multipliers_figure({title: recipe}, length, TRAINED, title)


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
