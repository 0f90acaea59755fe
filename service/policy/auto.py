"""``auto`` in a request: an encoding per range of reserved length.

A request sends the word, and the server adds the ranges at admission. Evaluations and stored jobs carry the ranges.
Every length then has its encoding, and a resumed job has the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    field_serializer,
)

from patches import (
    ENCODING_TAGS,
    InvalidEncoding,
    KnownFields,
    Method,
    PositionEncoding,
    Recipe,
    RopeGeometry,
    problem,
    problems_of,
)

AUTO: Final = "auto"

TAGS = frozenset({*ENCODING_TAGS, AUTO, "named"})
"""Names in the locations of pydantic's errors that are no fields."""

MOST_RANGES = 64
"""Ranges of one policy."""


def _without_numbers(method: Method) -> Method:
    """Refuse the ``pe`` of an answer: its numbers hold at one length, a range has many."""
    if method.follows:
        raise ValueError(f"a range takes the parameters of an encoding only: leave out {', '.join(method.follows)}")
    return method


class Range(KnownFields):
    """The encoding of reserved lengths above the range before and up to ``up_to`` tokens."""

    model_config = ConfigDict(frozen=True)

    up_to: Annotated[int, Field(ge=1)] | None = Field(
        description="Longest reserved length, prompt and new tokens; null for no end, in the last range only."
    )
    pe: Annotated[PositionEncoding, AfterValidator(_without_numbers)]

    @field_serializer("pe")
    def _written(self, pe: Method) -> dict[str, Any]:
        return pe.as_request()


def _ascending(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    for index, (shorter, longer) in enumerate(pairwise(ranges)):
        if shorter.up_to is None:
            raise ValueError(f"range {index} must have up_to: only the last range may have no end")
        if longer.up_to is not None and longer.up_to <= shorter.up_to:
            raise ValueError(f"range {index + 1} must have up_to above {shorter.up_to}, the end of the range before")
    return ranges


Ranges = Annotated[
    tuple[Range, ...], Field(min_length=1, max_length=MOST_RANGES, strict=False), AfterValidator(_ascending)
]


class Origin(KnownFields):
    """Origin of the ranges: a calibration by its id and its time, or the rule for models without one."""

    model_config = ConfigDict(frozen=True)

    source: Literal["rule", "file", "calibration", "request"]
    calibration: str | None = None
    created: str | None = None


class Auto(Method):
    """The method of the range that the reserved length lies in. ``ranges`` is None until admission."""

    unlabelled: ClassVar[frozenset[str]] = frozenset({"ranges", "origin"})

    method: Literal["auto"] = AUTO
    attention_temperature: None = Field(None, description="Each range has its own.")
    ranges: Ranges | None = Field(
        None, description="Encodings by reserved length; those in use for the model when absent."
    )
    origin: Origin = Field(Origin(source="request"), description="Origin of the ranges, for the record.")

    @classmethod
    def unknown_field(cls, name: str) -> str:
        """The other fields are those of answers."""
        return f"unknown field: {AUTO} takes ranges or nothing, and chooses by the reserved length"

    def chosen(self, length: int) -> tuple[int, Range]:
        """(longest length before the range, range) of a reserved length in tokens.

        Raises:
            ValueError: for a length beyond the last range, or without ranges.
        """
        if self.ranges is None:
            raise ValueError(f"{AUTO} has no ranges here: name an encoding")
        above = 0
        for found in self.ranges:
            if found.up_to is None or length <= found.up_to:
                return above, found
            above = found.up_to
        raise ValueError(
            f"{AUTO}: a reserved length of {length} tokens is beyond its last range, which ends at {above}"
        )

    @property
    def longest(self) -> int | None:
        """The longest reserved length with an encoding; None for no end."""
        return self.ranges[-1].up_to if self.ranges else None

    def at(self, length: int) -> Method:
        return self.chosen(length)[1].pe

    def encoding(self, geometry: RopeGeometry) -> Recipe:
        raise ValueError(f"{AUTO} has an encoding per reserved length, and no length is given")

    def depends_on_length(self, geometry: RopeGeometry) -> bool:
        return True


def is_auto(value: Any) -> bool:
    """True for any form of ``auto`` in a request."""
    if isinstance(value, str):
        return value.partition(":")[0].strip() == AUTO
    name = value.get("method") if isinstance(value, Mapping) else getattr(value, "method", None)
    return bool(name == AUTO)


def _kind(value: Any) -> str:
    return AUTO if is_auto(value) else "named"


def auto_fields(value: Any) -> Any:
    """Request fields of ``auto`` in any form.

    Raises:
        ValueError: for the word with parameters.
    """
    if not isinstance(value, str):
        return value
    if value.strip() != AUTO:
        raise problem("auto_parameters", f"{AUTO} takes no parameters: it chooses by the reserved length")
    return {"method": AUTO}


if TYPE_CHECKING:
    Encoding = Method
else:
    Encoding = Annotated[
        Annotated[Auto, BeforeValidator(auto_fields, json_schema_input_type=Literal[AUTO] | Auto), Tag(AUTO)]
        | Annotated[PositionEncoding, Tag("named")],
        Discriminator(_kind),
    ]
    """Request type: ``auto``, or any form of an encoding."""

_adapter: TypeAdapter[Method] = TypeAdapter(Encoding)


def parse_encoding(encoding: str | Mapping[str, Any]) -> Method:
    """The method that ``auto``, request fields or a short form ask for.

    Raises:
        InvalidEncoding: naming each unknown field, missing field or value out of range.
    """
    try:
        return _adapter.validate_python(encoding)
    except ValidationError as error:
        raise InvalidEncoding(problems_of(error.errors(), TAGS)) from None
