"""Encodings worth comparing on a model beyond its trained length, as the methods themselves propose them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import BasedMethod, Method
from patches.encoding.recipe import ResolvedRecipe
from patches.methods.frequencies.default import Default
from patches.methods.frequencies.linear import Linear
from patches.registry import METHODS
from patches.resolution import resolve

OWN = Default.model_validate({"method": "default"})
"""The checkpoint's own encoding."""

UNSCALED = Linear.model_validate({"method": "linear", "factor": 1.0})
"""Plain RoPE at the checkpoint's own base, also where it declares a scaling."""


def candidates(geometry: RopeGeometry, length: int) -> list[Method]:
    """The checkpoint's own encoding and, past its trained length, those for ``length`` tokens that need no tuning.

    Plain RoPE is among them at every length if the checkpoint declares a scaling or a position map. Weights may not be
    tuned for it. Encodings that do not fit the model are left out; of equal ones the first remains.
    """
    native = geometry.native
    has_map = isinstance(native, BasedMethod) and native.family == "rotary"
    proposed: list[Method] = [OWN, *([UNSCALED] if has_map or declares_scaling(geometry) else [])]
    if length > geometry.original_max_position_embeddings:
        kinds = (kind for kind in METHODS.values() if kind.family == geometry.family)
        proposed += [method for kind in kinds for method in _of(kind, geometry, length)]
    found: dict[tuple[object, ...], Method] = {}
    for method in proposed:
        try:
            resolved = resolve(method, geometry, length)
        except ValueError:  # does not fit this model
            continue
        found.setdefault(_numbers(resolved), method)
    return list(found.values())


def _numbers(resolved: ResolvedRecipe) -> tuple[object, ...]:
    """The numbers alone: different schedules have the same ones where few pairs rotate."""
    parts = (getattr(resolved.recipe, part.name) for part in fields(resolved.recipe) if part.name != "schedule")
    return *parts, resolved.inv_freq, resolved.attention_factor


def _of(kind: type[Method], geometry: RopeGeometry, length: int) -> Iterator[Method]:
    """The proposals of a method, then the same over plain RoPE if its base would be a declared scaling."""
    proposed = kind.candidates(geometry, length)
    yield from proposed
    if issubclass(kind, BasedMethod) and declares_scaling(geometry):
        yield from (method.model_copy(update={"base": UNSCALED}) for method in proposed)


def declares_scaling(geometry: RopeGeometry) -> bool:
    """True if the checkpoint's own encoding names a factor on its trained length."""
    native = geometry.native
    return isinstance(native, Method) and native.family == "rotary" and native.extension(geometry) not in (None, 1.0)


def alike(method: Method, geometry: RopeGeometry, length: int, other: int) -> Method:
    """The proposal for ``other`` tokens in place of ``method``, which was proposed for ``length``.

    A method that is no proposal remains as it is.
    """
    kind = type(method)
    for there, here in zip(_of(kind, geometry, length), _of(kind, geometry, other), strict=True):
        if there == method:
            return here
    return method
