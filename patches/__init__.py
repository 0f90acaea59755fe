"""Positional encodings as data: recipes, slots, and the seams that carry them into a model.

This is the public surface. Importing it loads no model library; ``patched`` and what belongs to it
load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patches.attention.mass import AttentionMass
from patches.encoding.distances import effective_distance
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe, ResolvedRecipe, RopeGeometry
from patches.model.batch import Batch, packed_batch
from patches.model.geometry import UnsupportedModel, geometry_of
from patches.model.slots import MAX_POSITION, SlotsExhausted, SlotTable, decode, encode
from patches.registry import (
    METHODS,
    PositionEncoding,
    describe,
    describe_method,
    describe_methods,
    examples,
    parse,
    resolve,
)
from patches.routes import one_per_route

if TYPE_CHECKING:
    from patches.model.hf import Patched, patched

__all__ = [
    "MAX_POSITION",
    "METHODS",
    "AttentionMass",
    "Batch",
    "Method",
    "Patched",
    "PositionEncoding",
    "Recipe",
    "ResolvedRecipe",
    "RopeGeometry",
    "SlotTable",
    "SlotsExhausted",
    "UnsupportedModel",
    "decode",
    "describe",
    "describe_method",
    "describe_methods",
    "effective_distance",
    "encode",
    "examples",
    "geometry_of",
    "one_per_route",
    "packed_batch",
    "parse",
    "patched",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name in ("patched", "Patched"):
        from patches.model import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
