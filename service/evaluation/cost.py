"""The cost of an evaluation, computed before any of its units exists, and the cost of an encoding."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel

from patches import ResolvedRecipe


class Cost(NamedTuple):
    """Tokens that all passes read, the passes, and the units that they belong to."""

    tokens: int = 0
    passes: int = 0
    units: int = 0

    def __add__(self, other: object) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, count: int) -> Cost:
        return Cost(*(count * part for part in self))


class EncodingCost(BaseModel):
    """The encoding's additions to ordinary attention, by weight. They are attentions per layer (bands), rotation of all
    keys at each read, and a bias on every score."""

    attentions: int
    rotated_when_read: bool
    bias: bool


def cost_of(resolved: ResolvedRecipe) -> EncodingCost:
    rotated, recipe = resolved.rotates_at == "cache_read", resolved.recipe
    return EncodingCost(attentions=len(recipe.bands), rotated_when_read=rotated, bias=recipe.score_bias is not None)


def weight_of(cost: EncodingCost) -> tuple[int, bool, bool]:
    """Costs in ascending order."""
    return cost.attentions, cost.rotated_when_read, cost.bias
