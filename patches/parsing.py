"""Encodings in requests, parsed into methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from patches.encoding.method import Method
from patches.encoding.temperature import KINDS
from patches.problems import Problem, problem, problems_of
from patches.registry import FREQUENCIES, METHODS
from patches.shorthand import from_text, unknown_method

ENCODING_TAGS = frozenset({*METHODS, *KINDS})
"""Names in the locations of pydantic's errors that are no fields."""

NOT_OF_THE_ENCODING = frozenset(
    {"llama_4_scaling_beta", "max_position_embeddings", "mrope_interleaved", "mrope_section"}
)
"""Entries of ``rope_parameters`` that a model's attention applies by itself, that place images, or that only repeat its
length."""

PLANES = "mrope"
"""Type in files of Qwen2-VL: plain RoPE, whose pairs take their positions from the planes of images."""

BY_LAYER = (
    "an object per type of layer is no encoding: ask for default where it is the checkpoint's own. Otherwise send "
    "that of full_attention layers"
)


class InvalidEncoding(ValueError):
    """The input is no encoding; ``problems`` names each field, and the allowed values."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class EchoedEncoding(BaseModel):
    """The `pe` of an answer: a method with every parameter in effect, and numbers that are compared."""

    model_config = ConfigDict(extra="allow")

    method: str
    requested: str
    frequency_hash: str


ShortForm = Annotated[
    str,
    Field(
        min_length=1,
        description="The short form: a method, then its parameters. A bare value is the first parameter.",
        examples=["yarn:4", "yarn:factor=4,beta_fast=16", "self_extend:base=(yarn:factor=4)"],
    ),
]


def _of_a_fixed_base(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """HunYuan's ``dynamic`` with an ``alpha`` is NTK-aware scaling by it, at any length. A factor would be unused."""
    name, alpha = fields.get("rope_type", fields.get("type")), fields.get("alpha")
    if name != "dynamic" or alpha is None or fields.get("factor") not in (None, 1):
        return fields
    unused = ("rope_type", "type", "alpha", "beta_fast", "beta_slow")
    return {key: value for key, value in fields.items() if key not in unused} | {"rope_type": "ntk", "factor": alpha}


def _from_rope_parameters(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept a transformers ``rope_parameters`` object: its ``rope_type`` (formerly ``type``) is our ``method``.

    Its nulls mean "not given". A legacy ``type`` beside an equal ``rope_type`` has no effect. Nor has ``mrope``, since
    all planes of a text are alike.
    """
    if "method" in fields:
        return fields
    fields = _of_a_fixed_base(fields)
    name = fields.get("rope_type", fields.get("type"))
    if name is None:
        return fields
    without_effect = {"rope_type", *NOT_OF_THE_ENCODING}
    if fields.get("type", name) in (name, PLANES):
        without_effect.add("type")
    if not (fields.get("mscale") and fields.get("mscale_all_dim")):
        without_effect |= {"mscale", "mscale_all_dim"}  # transformers uses the pair or nothing
    given = {key: value for key, value in fields.items() if key not in without_effect and value is not None}
    return {"method": "default" if name == PLANES else name} | given


def _reader(known: Mapping[str, type[Method]]) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        """Request fields of one of the ``known`` methods, from any form of an encoding."""
        if isinstance(given, Method):
            return given
        if isinstance(given, str):
            given = from_text(given)
        if not isinstance(given, Mapping):
            raise problem("encoding_type", "an encoding is an object with method, or a text such as 'yarn:4'")
        fields = _from_rope_parameters(given)
        if "method" not in fields and any(
            isinstance(value, Mapping) and "rope_type" in value for value in fields.values()
        ):
            raise problem("by_layer", BY_LAYER)
        if "method" not in fields:
            raise problem("missing_method", "required: the name of a method", "method")
        name = fields["method"]
        if not isinstance(name, str) or name not in METHODS:
            raise problem("unknown_method", unknown_method(name, known), "method")
        if name not in known:
            raise problem("no_schedule", f"{name} is no frequency schedule: there are {', '.join(known)}", "method")
        return fields

    return read


def _union(known: Mapping[str, type[Method]], *other: Any) -> Any:
    methods: Any = Annotated[reduce(or_, known.values()), Field(discriminator="method")]
    accepted = reduce(or_, (ShortForm, methods, *other))
    return Annotated[methods, BeforeValidator(_reader(known), json_schema_input_type=accepted)]


if TYPE_CHECKING:
    PositionEncoding = Method
else:
    FrequencyEncoding = _union(FREQUENCIES)
    for _method in METHODS.values():
        # ``base`` is any schedule of the table, which exists only now.
        _method.model_rebuild(_types_namespace={"FrequencyEncoding": FrequencyEncoding})
    PositionEncoding = TypeAliasType("PositionEncoding", _union(METHODS, EchoedEncoding))
    """Request type: the short form, or one of the methods by its field ``method``, or the ``pe`` of an answer."""

_adapter: TypeAdapter[Method] = TypeAdapter(PositionEncoding)


def parse(encoding: str | Mapping[str, Any] | Method) -> Method:
    """The method that request fields or a short form ask for: ``parse("yarn:4")``. Methods return as they are.

    Raises:
        InvalidEncoding: naming each unknown field, missing field or value out of range.
    """
    if isinstance(encoding, Method):
        return encoding
    try:
        return _adapter.validate_python(encoding)
    except ValidationError as error:
        raise InvalidEncoding(problems_of(error.errors(), ENCODING_TAGS)) from None
