"""Positional encodings as data: recipes, slots, and the seams that carry them into a model.

This is the public surface. Importing it loads no model library; ``patched`` and what belongs to it
load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patches.batch import Batch, packed_batch
from patches.distances import effective_distance
from patches.geometry import UnsupportedModel, geometry_of
from patches.method import Method
from patches.recipe import Recipe, ResolvedRecipe, RopeGeometry
from patches.registry import METHODS, PositionEncoding, describe, describe_methods, examples, parse, resolve
from patches.slots import MAX_POSITION, SlotsExhausted, SlotTable, decode, encode

if TYPE_CHECKING:
    from patches.hf import Patched, patched

__all__ = [
    "MAX_POSITION",
    "METHODS",
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
    "describe_methods",
    "effective_distance",
    "encode",
    "examples",
    "geometry_of",
    "packed_batch",
    "parse",
    "patched",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name in ("patched", "Patched"):
        from patches import hf

        return getattr(hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
