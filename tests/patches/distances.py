"""Effective distances of a recipe, read off its bands."""

from __future__ import annotations

import torch

import patches
from patches import Recipe


def effective_distance(recipe: Recipe, length: int) -> torch.Tensor:
    """float64 [length, length, 1 or pairs]: by how much key n is turned against query m; NaN: not attended."""
    return patches.effective_distance(recipe, torch.arange(length), torch.arange(length))


def plain_distance(length: int) -> torch.Tensor:
    """float64 [length, length, 1]: of ordinary RoPE, NaN above the diagonal."""
    return effective_distance(Recipe(None), length)
