"""Effective distances between queries and keys under the bands of a recipe."""

from __future__ import annotations

import torch

from patches.encoding.recipe import Recipe
from patches.encoding.rotary import per_pair


def effective_distance(recipe: Recipe, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """float64 [q, k, 1 or pairs]: positions by which a key is rotated against a query; NaN: not attended.

    ``q_idx`` int64 [q] and ``kv_idx`` int64 [k] are token indices. The last dimension has one entry per rotary pair if
    bands differ by pair. Without rotation, the distances of attended pairs are those of the tokens.
    """
    distance = torch.full((len(q_idx), len(kv_idx), 1), torch.nan, dtype=torch.float64)
    for band in recipe.bands:
        covered = band.predicate(q_idx[:, None], kv_idx[None])[..., None]
        apart = per_pair(band.query_map(q_idx))[:, None] - per_pair(band.key_map(kv_idx))[None]
        distance = torch.where(covered, apart.double(), distance)
    return distance
