"""Every method as the documentation draws it: one small geometry, four times the trained length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from patches import METHODS, Recipe, ResolvedRecipe, RopeGeometry, effective_distance, parse, resolve

PAIRS, HEADS, TRAINED, TIMES_LONGER = 32, 8, 256, 4
GEOMETRY = RopeGeometry(
    head_dim=2 * PAIRS,
    rotary_dim=2 * PAIRS,
    rope_theta=10_000.0,
    original_max_position_embeddings=TRAINED,
    max_position_embeddings=TIMES_LONGER * TRAINED,
    num_attention_heads=HEADS,
)

STANDING_IN: dict[str, Any] = {
    "partial_rotary_factor": 0.25,
    "factor": float(TIMES_LONGER),
    "short_factor": [1.0] * PAIRS,
    "long_factor": [round(TIMES_LONGER ** min(1.0, i / 20), 3) for i in range(PAIRS)],
    "inv_freq": [0.0 if i % 8 == 7 else round(10_000.0 ** (-i / PAIRS), 6) for i in range(PAIRS)],
    "group_factors": [2, 8, 2, 8, 32, 32, 32, 4],
    "relative_attention_bias": [
        [round(-(head + 1) / HEADS * math.log1p(bucket), 3) for head in range(HEADS)] for bucket in range(32)
    ],
}
"""Values by the name of the field, for fields without a default or with a neutral one."""

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
    return resolve(parse({"method": "default"}), GEOMETRY, TRAINED)


def samples() -> list[Sample]:
    """Every method, in the order of the registry."""
    return [sample(name) for name in METHODS]


def sample(name: str) -> Sample:
    """One method with its defaults; ``STANDING_IN`` replaces missing and neutral values."""
    method = METHODS[name]
    fields: dict[str, Any] = {"method": name}
    neutral = []
    for key, value in STANDING_IN.items():
        field = method.model_fields.get(key)
        if field is not None and (field.is_required() or (key in method.__annotations__ and field.default is None)):
            fields[key] = value
        elif field is not None and field.default == 1.0:
            neutral.append(key)
    drawn = resolved_sample(fields)
    for key in neutral:
        if _changes_nothing(drawn.resolved):
            drawn = resolved_sample({**fields, key: STANDING_IN[key]})
    return drawn


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


def _changes_nothing(resolved: ResolvedRecipe) -> bool:
    """True for plain RoPE and for no encoding at all."""
    if not resolved.rotates:
        return resolved.recipe == Recipe(None)
    return resolved.is_plain and resolved.inv_freq == plain().inv_freq and resolved.attention_factor == 1.0
