"""Learned relative vectors of a loaded model, without Plotly: a server computes them beside the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from patches import Recipe

POINTS, FAR = 256, 1 << 16
"""Distances that are drawn at most, and the largest of them: some methods compute all distances below it."""


def drawn_distances(length: int) -> torch.Tensor:
    """Distances int64 of a text of ``length`` tokens, at equal steps with both ends."""
    most = min(length, FAR)
    return torch.linspace(0, most - 1, min(most, POINTS)).round().long()


@torch.no_grad()
def vector_norms(model: nn.Module, recipe: Recipe, length: int) -> list[list[float]]:
    """Norms [layers, distances] of the vectors r in the terms q . r of ``recipe``, means over the heads of a layer.

    The distances are ``drawn_distances``. Terms that depend on no query are left out.
    """
    distance = drawn_distances(length)
    layers = [module for module in model.modules() if getattr(module, "relative", None) is not None]
    return [_norms(layer, recipe, distance).tolist() for layer in layers]


def _norms(attention: Any, recipe: Recipe, distance: torch.Tensor) -> torch.Tensor:
    """float32 [distances]: the scores of the unit queries are the coordinates of r."""
    assert recipe.relative is not None
    weight: torch.Tensor = next(attention.parameters())
    heads, width = attention.config.num_attention_heads, attention.head_dim
    one_hot = torch.eye(width, dtype=weight.dtype, device=weight.device).expand(1, heads, width, width)
    key = weight.new_zeros(1, heads, len(distance), width)
    places = distance.to(weight.device)[None]
    nothing = torch.zeros_like(one_hot)
    terms, constant = (recipe.relative(attention, query, key, places)[0].float() for query in (one_hot, nothing))
    norms: torch.Tensor = (terms - constant).norm(dim=1).mean(0)
    return norms
