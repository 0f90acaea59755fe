"""The one table of methods: request fields in, method or recipe out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

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
    """Accept a transformers ``rope_parameters`` object: its ``rope_type`` (formerly ``type``) is our ``method``.

    Its nulls mean "not given". A legacy ``type`` beside an equal ``rope_type`` says nothing new.
    """
    if not isinstance(fields, Mapping) or "method" in fields:
        return fields
    name = fields.get("rope_type", fields.get("type"))
    if name is None:
        return fields
    without_effect = {"rope_type"} | ({"type"} if fields.get("type", name) == name else set())
    if not (fields.get("mscale") and fields.get("mscale_all_dim")):
        without_effect |= {"mscale", "mscale_all_dim"}  # transformers uses the pair or nothing
    given = {key: value for key, value in fields.items() if key not in without_effect and value is not None}
    return {"method": name} | given


if TYPE_CHECKING:
    PositionEncoding = Method
else:
    _any_method = Annotated[reduce(or_, METHODS.values()), Field(discriminator="method")]
    PositionEncoding = Annotated[_any_method, BeforeValidator(_from_rope_parameters)]
    """Request type: a discriminated union on ``method``, made from the table."""

_adapter: TypeAdapter[Method] = TypeAdapter(PositionEncoding)


def parse(fields: Mapping[str, Any]) -> Method:
    """Validate request fields.

    Raises:
        pydantic.ValidationError: naming each unknown key, missing field or value out of range.
    """
    return _adapter.validate_python(fields)


def effective(method: Method, geometry: RopeGeometry) -> Method:
    """``method`` itself, or the checkpoint's own scaling where "default" without parameters stands for it."""
    return parse(dict(geometry.native)) if geometry.native and method == Default() else method


def resolve(method: Method, geometry: RopeGeometry, length: int) -> ResolvedRecipe:
    """Numbers of ``method`` for one model and one reserved length (prompt + new tokens).

    Raises:
        ValueError: when the method or a parameter does not fit the model; the message names it.
    """
    return effective(method, geometry).recipe(geometry).resolve(geometry, length)


def describe(method: Method, geometry: RopeGeometry, length: int) -> dict[str, Any]:
    """What a response echoes: the method in effect, every parameter, and every number that follows.

    Raises:
        ValueError: as ``resolve``.
    """
    in_effect = effective(method, geometry)
    resolved = resolve(method, geometry, length)
    return {
        "method": in_effect.method,
        **in_effect.parameters(geometry),
        "requested": method.method,
        "attention_factor": resolved.attention_factor,
        "effective_rope_theta": resolved.rope_theta if resolved.rotates else None,
        "rotates_at": resolved.rotates_at,
        "bands": len(resolved.recipe.bands),
        "reserved_length": resolved.length,
        "frequency_hash": resolved.frequency_hash,
    }


def examples() -> list[dict[str, Any]]:
    """Encodings worth comparing on any rotary model, as request fields: for documentation and demos."""
    return [{"method": "default"}, {"method": "yarn", "factor": 8}, {"method": "alibi"}]


def describe_methods() -> list[dict[str, Any]]:
    """Every method with its JSON schema, for listings and generated tables."""
    return [
        {
            "method": name,
            "summary": method.summary,
            "paper": method.paper,
            "training_free": method.training_free,
            "cost": method.cost,
            "rotates_at": method.rotates_at,
            "parameters": method.model_json_schema(),
        }
        for name, method in METHODS.items()
    ]
