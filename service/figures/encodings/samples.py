"""Every method as the documentation draws it: one small geometry, four times the trained length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from patches import METHODS, OWN, ResolvedRecipe, RopeGeometry, effective_distance, parse, resolve

PAIRS, HEADS, TRAINED, TIMES_LONGER = 32, 8, 256, 4
GEOMETRY = RopeGeometry(
    head_dim=2 * PAIRS,
    rotary_dim=2 * PAIRS,
    rope_theta=10_000.0,
    original_max_position_embeddings=TRAINED,
    max_position_embeddings=TIMES_LONGER * TRAINED,
    num_attention_heads=HEADS,
)

Group = Literal["frequency schedule", "position map", "mask", "bias", "relative vectors", "absolute", "none"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Sample:
    """A method as the documentation draws it: its request, resolved for ``length`` reserved tokens."""

    fields: Mapping[str, Any]
    geometry: RopeGeometry
    length: int
    resolved: ResolvedRecipe

    @property
    def name(self) -> str:
        return str(self.fields["method"])

    @property
    def group(self) -> Group:
        """The kind of encoding, derived from its family and its parts."""
        recipe = self.resolved.recipe
        if self.geometry.adds_positions:
            return "absolute"
        if recipe.relative is not None:
            return "relative vectors"
        if recipe.schedule is None:
            return "none" if recipe.score_bias is None else "bias"
        tokens = torch.arange(self.length)
        if effective_distance(recipe, tokens[-1:], tokens).isnan().any():
            return "mask"
        return "frequency schedule" if len(recipe.bands) == 1 else "position map"


def plain() -> ResolvedRecipe:
    """Plain RoPE, the reference of the pictures."""
    return resolve(OWN, GEOMETRY, TRAINED)


def samples() -> list[Sample]:
    """Every method, in the order of the registry."""
    return [sample(name) for name in METHODS]


def sample(name: str) -> Sample:
    """One method with the parameters of its ``example``."""
    return resolved_sample({"method": name, **METHODS[name].example(GEOMETRY, TIMES_LONGER)})


def resolved_sample(fields: Mapping[str, Any]) -> Sample:
    """Resolve on a model of the method's family, at four times the trained length (once if the method ends there)."""
    method = parse(fields)
    geometry = GEOMETRY
    if method.family in ("learned", "sinusoidal", "relative"):
        rows = TRAINED if method.family == "learned" else None
        geometry = replace(GEOMETRY, family=method.family, native=method, table_rows=rows)
    try:
        resolved, length = resolve(method, geometry, TIMES_LONGER * TRAINED), TIMES_LONGER * TRAINED
    except ValueError:
        resolved, length = resolve(method, geometry, TRAINED), TRAINED
    return Sample(fields, geometry, length, resolved)
