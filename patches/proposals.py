"""Encodings worth comparing on a model beyond its trained length, as the methods themselves propose them."""

from __future__ import annotations

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import ResolvedRecipe
from patches.methods.frequencies.default import Default
from patches.registry import METHODS
from patches.resolution import resolve


def candidates(geometry: RopeGeometry, length: int) -> list[Method]:
    """The checkpoint's own encoding and, past its trained length, those for ``length`` tokens that need no tuning.

    Encodings that do not fit the model are left out; of equal ones the first remains.
    """
    default = Default()
    if length <= geometry.original_max_position_embeddings:
        return [default]
    proposed = (
        method
        for kind in METHODS.values()
        if kind.family == geometry.family
        for method in kind.candidates(geometry, length)
    )
    found: dict[ResolvedRecipe, Method] = {}
    for method in [default, *proposed]:
        try:
            resolved = resolve(method, geometry, length)
        except ValueError:  # does not fit this model
            continue
        found.setdefault(resolved, method)
    return list(found.values())


def alike(method: Method, geometry: RopeGeometry, length: int, other: int) -> Method:
    """The proposal for ``other`` tokens in place of ``method``, which was proposed for ``length``.

    A method that is no proposal remains as it is.
    """
    kind = type(method)
    for there, here in zip(kind.candidates(geometry, length), kind.candidates(geometry, other), strict=True):
        if there == method:
            return here
    return method
