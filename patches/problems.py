"""Problems of a request in one sentence each: the field, and the allowed or the nearest values."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MAX_SHOWN = 64
"""Characters of a wrong value that are repeated."""

MAX_ERRORS = 11
"""Most errors of pydantic that are read: a list of numbers may have one in every entry."""

UNION_LABELS = frozenset({"constrained-float", "constrained-int", "constrained-str", "float", "int", "str", "bool"})
"""Pydantic's names of the plain types in a union."""


class Problem(NamedTuple):
    """A field by its dotted path, empty for the whole, and its problem."""

    field: str
    message: str

    def __str__(self) -> str:
        last = self.field.rpartition(".")[2]
        if self.message.startswith(f"{last} "):
            return self.field + self.message.removeprefix(last)
        return f"{self.field}: {self.message}" if self.field else self.message


def problem(kind: str, message: str, field: str = "") -> PydanticCustomError:
    """An error for a validator to raise; ``field`` is the wrong part of the validator's input."""
    return PydanticCustomError(kind, "{message}", {"message": message, "field": field})


def in_words(error: ValueError) -> str:
    """The message of an error, with the field if it is one of ``problem``."""
    if isinstance(error, PydanticCustomError) and error.context is not None:
        return str(Problem(error.context["field"], error.context["message"]))
    return str(error)


FEW = 6
"""Names that are listed where another place has them all."""


ALIKE = 0.6
"""Likeness of names that are near, from 0 to 1.1."""


def unknown(what: str, name: object, known: Collection[str], listed_by: str = "", near: Collection[str] = ()) -> str:
    """``unknown method 'yarm': did you mean yarn?``, or the known names if none is near: a few of many that
    ``listed_by`` lists. ``near`` are those that are meant, if that is known."""
    return f"unknown {what} {_shown(name)}: {_nearest(name, known, listed_by, near)}"


def _nearest(name: object, known: Collection[str], listed_by: str = "", near: Collection[str] = ()) -> str:
    close = near or (_close(name[:MAX_SHOWN], known) if isinstance(name, str) else [])
    if close:
        return f"did you mean {' or '.join(close)}?"
    if listed_by and len(known) > FEW:
        return f"there are {', '.join(islice(known, FEW))} and {len(known) - FEW} others: see {listed_by}"
    return f"there are {', '.join(known)}"


def _close(name: str, known: Collection[str]) -> list[str]:
    """Up to three names much like ``name``. People get the first letter right."""

    def likeness(other: str) -> float:
        return difflib.SequenceMatcher(None, other, name).ratio() + (other[:1] == name[:1]) / 10

    found = sorted(((likeness(other), other) for other in known), reverse=True)
    return [other for like, other in found[:3] if like >= max(ALIKE, found[0][0] - ALIKE / 4)]


class KnownFields(BaseModel):
    """A model that refuses unknown fields before it validates others, and names the nearest field that it has.

    A number is no text and no truth value in JSON: it takes ``4``, and neither ``"4"`` nor ``true``.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping):
            known = cls.field_names()
            name = next((name for name in fields if name not in known), None)
            if name is not None:
                raise problem("unknown_field", cls.unknown_field(str(name)), str(name)[:MAX_SHOWN])
        return fields

    @classmethod
    def unknown_field(cls, name: str) -> str:
        """Message for a field that this model does not have."""
        return f"unknown field: {_nearest(name, cls.field_names())}"

    @classmethod
    def field_names(cls) -> list[str]:
        """Its fields as requests name them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


def problems_of(errors: Iterable[Any], leave_out: Collection[str] = ()) -> list[Problem]:
    """The first of pydantic's errors in plain words, one problem per field.

    ``leave_out`` are parts of error locations that are no fields: tags of unions.
    """
    wrong: dict[str, list[str]] = {}
    values: dict[str, object] = {}
    for error in islice(errors, MAX_ERRORS):
        field = _field(error, {*UNION_LABELS, *leave_out})
        wrong.setdefault(field, []).append(_message(error))
        values[field] = _sent(error)
    # A problem inside one type of a union says more than the mismatch with the others.
    inside = [field for field in wrong if not any(other.startswith(f"{field}.") for other in wrong)]
    return [Problem(field, _joined(wrong[field], values[field])) for field in inside]


def _field(error: Mapping[str, Any], leave_out: Collection[str]) -> str:
    """Dotted path. A body that matches no member of a union lacks the discriminator."""
    parts = [str(part) for part in error["loc"] if part not in leave_out and "[" not in str(part)]
    parts.append(_within(error))
    return ".".join(part for part in parts if part)


def _within(error: Mapping[str, Any]) -> str:
    """The wrong part of the value that was checked, or nothing."""
    context = error.get("ctx", {})
    return str(context.get("discriminator") or context.get("field") or "").strip("'")


ABSENT = object()
"""No value was sent."""


def _sent(error: Mapping[str, Any]) -> object:
    """The value of the wrong field, also where its validator is that of the object around it, or ABSENT."""
    value = error["input"]
    for part in _within(error).split("."):
        if part and isinstance(value, Mapping) and part in value:
            value = value[part]
        elif part and isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif part:
            return ABSENT
    return value


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "union_tag_invalid":
        return _unknown_tag(error)
    if error["type"] == "float_type" and type(error["input"]) is int:
        return f"must be within ±{sys.float_info.max:.1e}"
    say = _WORDS.get(error["type"])
    return str(error["msg"]).replace("Input should", "must") if say is None else say(error.get("ctx", {}))


def _joined(messages: list[str], value: object) -> str:
    """The demands of every type that a field takes, and the value sent."""
    message = " or ".join(dict.fromkeys(messages))
    return f"{message}, not {_shown(value)}" if message.startswith("must ") and value is not ABSENT else message


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN])
    if isinstance(value, bool | int | float) or value is None:
        try:
            text = json.dumps(value)
        except ValueError:
            return f"a number of more than {sys.get_int_max_str_digits()} digits"
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "this"


def _number(value: float) -> str:
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return f"{value:g}"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _unknown_tag(error: Mapping[str, Any]) -> str:
    known, given = [tag.strip(" '") for tag in str(error["ctx"]["expected_tags"]).split(",")], _sent(error)
    return unknown(_within(error), given, known) if isinstance(given, str) else f"must be one of {', '.join(known)}"


_KINDS = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "an object"),
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "finite_number": "a finite number",
}
_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    **{kind: lambda _, what=what: f"must be {what}" for kind, what in _KINDS.items()},  # type: ignore[misc]
    "missing": lambda _: "required",
    "union_tag_not_found": lambda _: "required",
    "literal_error": lambda context: f"must be {context['expected']}",
    "greater_than": lambda context: f"must be above {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "less_than": lambda context: f"must be below {_number(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
    "multiple_of": lambda context: f"must be a multiple of {_number(context['multiple_of'])}",
    "too_short": lambda context: f"needs at least {_counted(context['min_length'], 'entry', 'entries')}",
    "too_long": lambda context: f"may have at most {_counted(context['max_length'], 'entry', 'entries')}",
    "string_pattern_mismatch": lambda context: f"must match {context['pattern']}",
    "string_too_short": lambda context: f"needs at least {_counted(context['min_length'], 'character', 'characters')}",
    "string_too_long": lambda context: f"may have at most {_counted(context['max_length'], 'character', 'characters')}",
    "value_error": lambda context: str(context["error"]),
    "assertion_error": lambda context: str(context["error"]),
    "json_invalid": lambda context: f"not valid JSON: {context['error']}",
}
"""Messages by pydantic's type of error. The value sent follows a message with "must"."""
