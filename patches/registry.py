"""The one table of methods: request fields in, method or recipe out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

from patches.method import Method
from patches.methods.alibi import Alibi
from patches.methods.by_parts import NtkByParts, Yarn
from patches.methods.linear import Linear
from patches.methods.llama3 import Llama3
from patches.methods.longrope import LongRope
from patches.methods.ntk import DynamicNtk, Ntk
from patches.methods.self_extend import SelfExtend
from patches.methods.unscaled import Default, NoPositions
from patches.recipe import ResolvedRecipe, RopeGeometry

METHODS: dict[str, type[Method]] = {
    "default": Default,
    "none": NoPositions,
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": DynamicNtk,
    "ntk_by_parts": NtkByParts,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
    "alibi": Alibi,
    "self_extend": SelfExtend,
}


def _from_rope_parameters(fields: Any) -> Any:
    """Accept a transformers ``rope_parameters`` object: its ``rope_type`` is our ``method``."""
    if isinstance(fields, Mapping) and "rope_type" in fields and "method" not in fields:
        rest = {name: value for name, value in fields.items() if name != "rope_type"}
        return {"method": fields["rope_type"], **rest}
    return fields


AnyMethod = Annotated[
    reduce(or_, METHODS.values()),  # the table is the union, written once
    Field(discriminator="method"),
]
PositionEncoding = Annotated[AnyMethod, BeforeValidator(_from_rope_parameters)]
"""Request type: a discriminated union on ``method``."""

_adapter: TypeAdapter[Method] = TypeAdapter(PositionEncoding)


def parse(fields: Mapping[str, Any]) -> Method:
    """Validate request fields.

    Raises:
        pydantic.ValidationError: naming each unknown key, missing field or value out of range.
    """
    return _adapter.validate_python(fields)


def resolve(method: Method, geometry: RopeGeometry, length: int) -> ResolvedRecipe:
    """Numbers of ``method`` for one model and one reserved length (prompt + new tokens).

    "default" without parameters means the checkpoint's own encoding, scaled or not.

    Raises:
        ValueError: when the method or a parameter does not fit the model; the message names it.
    """
    if geometry.native and method == Default():
        method = parse(dict(geometry.native))
    return method.recipe(geometry).resolve(geometry, length)


def describe(method: Method, resolved: ResolvedRecipe) -> dict[str, Any]:
    """What a response echoes: every parameter and every number that took effect."""
    return {
        "method": method.method,
        **method.parameters(),
        "attention_factor": resolved.attention_factor,
        "rope_theta": resolved.rope_theta if resolved.rotates else None,
        "rotates_at": resolved.rotates_at,
        "bands": len(resolved.recipe.bands),
        "reserved_length": resolved.length,
        "frequency_hash": resolved.frequency_hash,
    }


def describe_methods() -> list[dict[str, Any]]:
    """Every method with its JSON schema, for listings and generated tables."""
    return [
        {
            "method": name,
            "summary": method.summary,
            "paper": method.paper,
            "training_free": method.training_free,
            "cost": method.cost,
            "schema": method.model_json_schema(),
        }
        for name, method in METHODS.items()
    ]
