"""The one table of methods: request fields in, method or recipe out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

from patches.encoding.method import FrequencyMethod, Method
from patches.encoding.recipe import ResolvedRecipe, RopeGeometry
from patches.methods.absolute import (
    Learned,
    LearnedHierarchical,
    LearnedInterpolation,
    Sinusoidal,
    SinusoidalInterpolation,
)
from patches.methods.biases.alibi import Alibi
from patches.methods.biases.kerple import KerpleLog, KerplePower
from patches.methods.biases.sandwich import Sandwich
from patches.methods.biases.t5_bias import T5Bias
from patches.methods.drope import Drope
from patches.methods.frequencies.by_parts import DynamicYarn, NtkByParts, Yarn, YarnPaper
from patches.methods.frequencies.clipped_rope import ClippedRope
from patches.methods.frequencies.custom import Custom
from patches.methods.frequencies.default import Default
from patches.methods.frequencies.linear import DynamicLinear, Linear
from patches.methods.frequencies.llama3 import Llama3
from patches.methods.frequencies.longrope import LongRope
from patches.methods.frequencies.mrrope import MrRopeProgressive, MrRopeUniform, TailSpline
from patches.methods.frequencies.ntk import DynamicNtk, Ntk
from patches.methods.frequencies.proportional import Proportional
from patches.methods.frequencies.resonance import Resonance
from patches.methods.frequencies.su_ntk import NtkFixed, NtkMixed
from patches.methods.none import NoPositions
from patches.methods.position_maps.dpe import Dpe
from patches.methods.position_maps.dual_chunk import DualChunk
from patches.methods.position_maps.rerope import LeakyReRope, ReRope
from patches.methods.position_maps.self_extend import SelfExtend
from patches.methods.position_maps.string import String
from patches.methods.relative import Shaw, TransformerXL
from patches.methods.windows.lm_infinite import LmInfinite
from patches.methods.windows.streaming import Streaming

FREQUENCIES: dict[str, type[FrequencyMethod]] = {
    "default": Default,
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": DynamicNtk,
    "ntk_by_parts": NtkByParts,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
    "dynamic_linear": DynamicLinear,
    "dynamic_yarn": DynamicYarn,
    "yarn_paper": YarnPaper,
    "ntk_fixed": NtkFixed,
    "ntk_mixed": NtkMixed,
    "mrrope_uni": MrRopeUniform,
    "mrrope_pro": MrRopeProgressive,
    "tailspline": TailSpline,
    "proportional": Proportional,
    "custom": Custom,
}
"""Frequency schedules: whatever stands on a schedule (``base``) may stand on any of these."""

METHODS: dict[str, type[Method]] = {
    **FREQUENCIES,
    "resonance": Resonance,
    "clipped_rope": ClippedRope,
    "none": NoPositions,
    "drope": Drope,
    "alibi": Alibi,
    "sandwich": Sandwich,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "t5_bias": T5Bias,
    "self_extend": SelfExtend,
    "rerope": ReRope,
    "leaky_rerope": LeakyReRope,
    "dual_chunk": DualChunk,
    "string": String,
    "dpe": Dpe,
    "lm_infinite": LmInfinite,
    "streaming": Streaming,
    "learned": Learned,
    "learned_interpolation": LearnedInterpolation,
    "learned_hierarchical": LearnedHierarchical,
    "sinusoidal": Sinusoidal,
    "sinusoidal_interpolation": SinusoidalInterpolation,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
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


def _union(methods: Iterable[type[Method]]) -> Any:
    return Annotated[
        Annotated[reduce(or_, methods), Field(discriminator="method")], BeforeValidator(_from_rope_parameters)
    ]


if TYPE_CHECKING:
    PositionEncoding = Method
else:
    FrequencyEncoding = _union(FREQUENCIES.values())
    for _method in METHODS.values():
        # ``base`` is any schedule of the table, which exists only now.
        _method.model_rebuild(_types_namespace={"FrequencyEncoding": FrequencyEncoding})
    PositionEncoding = _union(METHODS.values())
    """Request type: a discriminated union on ``method``, made from the table."""

_adapter: TypeAdapter[Method] = TypeAdapter(PositionEncoding)


def parse(fields: Mapping[str, Any]) -> Method:
    """Validate request fields.

    Raises:
        pydantic.ValidationError: naming each unknown key, missing field or value out of range.
    """
    return _adapter.validate_python(fields)


def effective(method: Method, geometry: RopeGeometry) -> Method:
    """``method`` itself, or the checkpoint's own encoding where "default" without parameters stands for it."""
    return geometry.native if geometry.native is not None and method == Default() else method


@lru_cache(maxsize=1024)  # a request asks three times: at the door, in the engine and for its echo
def resolve(method: Method, geometry: RopeGeometry, length: int) -> ResolvedRecipe:
    """Numbers of ``method`` for one model and one reserved length (prompt + new tokens).

    Raises:
        ValueError: when the method or a parameter does not fit the model; the message names it.
    """
    return method.recipe(geometry).resolve(geometry, length)


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
        "effective_rope_theta": resolved.rope_theta or None,
        "rotates_at": resolved.rotates_at,
        "bands": len(resolved.recipe.bands),
        "reserved_length": resolved.length,
        "frequency_hash": resolved.frequency_hash,
    }


ABOUT = (
    "summary",
    "use",
    "avoid",
    "reach",
    "evidence",
    "training_free",
    "paper",
    "formula",
    "cost",
    "rotates_at",
    "family",
)
"""What every method tells of itself, in the order in which listings show it."""


def examples() -> list[dict[str, Any]]:
    """Encodings worth comparing on any rotary model, as request fields: for documentation and demos."""
    return [{"method": "default"}, {"method": "yarn", "factor": 8}, {"method": "alibi"}]


def describe_methods() -> list[dict[str, Any]]:
    """Every method with its JSON schema, for listings and generated tables."""
    return [describe_method(name) for name in METHODS]


def describe_method(name: str) -> dict[str, Any]:
    """What a method tells of itself, and its JSON schema."""
    about = {field: getattr(METHODS[name], field) for field in ABOUT}
    return {"method": name, **about, "parameters": _schema(name)}


@cache
def _schema(name: str) -> dict[str, Any]:
    return METHODS[name].model_json_schema()  # 25 to 60 ms
