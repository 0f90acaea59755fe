"""Encodings in one word: ``yarn:4``, ``yarn:factor=4,beta_fast=16``, or the JSON object itself.

The grammar is ``method[:item,item...]`` with items ``key=value``. One item may be a bare value. It sets the method's
first required field, else its first own field, else its only one. Values are JSON if they parse as JSON, and text
otherwise. The value of an encoding's field may be a short form, in parentheses if it has commas:
``self_extend:base=(yarn:4,beta_fast=16)``. A label, ``yarn(factor=4, beta_fast=16)``, is read too. Nothing here checks
values: ``patches.parse`` does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic_core import PydanticCustomError

from patches.encoding.method import Method
from patches.encoding.temperature import to_short_form
from patches.json_text import NOT_JSON, read_json
from patches.problems import MAX_SHOWN, problem, unknown
from patches.registry import METHODS

LABEL = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
"""A label by ``label_of``."""
LISTED_BY = "GET /methods or `ropeway methods`"
ONE = "commas separate the parameters of one encoding; give several as a list, in the shell by repeating --pe"
MARK = re.compile(r'["\\\[\](){},]')
NESTED = 4
"""Deepest nesting of encodings, which is more than any of them takes."""


def from_text(text: str) -> dict[str, Any]:
    """Request fields from a JSON object or the short form.

    Raises:
        ValueError: when the text is neither; the message names the problem.
    """
    if not text.lstrip().startswith("{"):
        return from_shorthand(text)
    fields: dict[str, Any] = read_json(text)
    return fields


def from_shorthand(text: str) -> dict[str, Any]:
    """Request fields from the short form, not validated.

    Raises:
        ValueError: for an unknown method, a key given twice, a bare value without a field, or too deep nesting.
    """
    return _fields(text, NESTED)


def unknown_method(name: object, known: Collection[str] = METHODS.keys()) -> str:
    """Message for an unknown method; for a label such as ``yarn(factor=4)``, with the short form to write."""
    label = LABEL.fullmatch(name) if isinstance(name, str) else None
    if label is None or label[1] not in known:
        same = [
            own for own, method in METHODS.items() if own in known and _plain(name) in map(_plain, (own, *method.also))
        ]
        return unknown("method", name, known, LISTED_BY, near=same)
    return f"unknown method {label[0][:MAX_SHOWN]!r}: write {label[1]}:{label[2][:MAX_SHOWN]}"


def _plain(name: object) -> str:
    """Letters and digits only: ``Dynamic NTK`` and ``dynamic_ntk`` are one name."""
    return re.sub(r"[\W_]", "", str(name)[:MAX_SHOWN].lower())


def field_value(method: type[Method], key: str, text: str, depth: int = NESTED) -> Any:
    """The value of one field: JSON, or text, which is a short form if the field takes an encoding.

    Raises:
        ValueError: as ``from_shorthand``, for a field that takes an encoding. As ``read_json``, for JSON.
    """
    value = _value(text, key)
    if not isinstance(value, str) or not _takes_an_encoding(method, key):
        return value
    if depth == 0:
        raise ValueError(f"{key}: encodings are nested more than {NESTED} deep")
    if value.startswith("(") and not value.endswith(")"):
        raise ValueError(f"{key}: {value[:MAX_SHOWN]!r} opens a parenthesis that it does not close")
    return _fields(value[1:-1] if value.startswith("(") and value.endswith(")") else value, depth - 1)


def to_shorthand(fields: Mapping[str, Any]) -> str:
    """Request fields in the short form that gives them back: ``yarn:4``, ``yarn:factor=4,beta_fast=16``."""
    name = str(fields["method"])
    method = METHODS[name]
    written = {key: _written(method, key, value) for key, value in fields.items() if key != "method"}
    if not written:
        return name
    first = next(iter(written.values()))
    if list(written) == _fields_of_a_bare_value(method)[:1] and "=" not in first:
        return f"{name}:{first}"
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in written.items())


def _fields(text: str, depth: int) -> dict[str, Any]:
    label = LABEL.fullmatch(text.strip())
    name, colon, rest = (label[1], "(", label[2]) if label else text.partition(":")
    name = name.strip()
    method = METHODS.get(name)
    if method is None and any(part.strip() in METHODS for part in name.split(",")):
        raise ValueError(f"{text[:MAX_SHOWN]!r} names several: {ONE}")
    if method is None:
        raise ValueError(unknown_method(name))
    fields: dict[str, Any] = {"method": name}
    if not colon:
        return fields
    for item in _items(rest):
        key, equals, value = item.partition("=")
        if not equals:
            bare = _fields_of_a_bare_value(method)
            if not bare:
                raise ValueError(f"{name} takes no bare value: write key=value")
            if item.strip() and bare[0] in fields:
                raise ValueError(f"{name}: {item[:MAX_SHOWN]!r} is another {bare[0]}: {ONE}")
            key, value = bare[0], item
        key, value = key.strip(), value.strip()
        if not key or not value:
            raise ValueError(f"{name}: {item[:64]!r} is not key=value")
        if key in fields:
            raise ValueError(f"{name}: {key[:64]!r} is given twice")
        fields[key] = field_value(method, key, value, depth)
    return fields


def _items(text: str) -> list[str]:
    """Split at the commas outside brackets and JSON strings, in linear time whatever the text."""
    items, begin, depth, quoted, escaped = [], 0, 0, False, -1
    for mark in MARK.finditer(text):
        at, char = mark.start(), mark[0]
        if at == escaped:
            continue
        if quoted:
            escaped = at + 1 if char == "\\" else escaped
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth = max(0, depth - 1)
        elif char == "," and depth == 0:
            items.append(text[begin:at])
            begin = at + 1
    return [*items, text[begin:]]


def _takes_an_encoding(method: type[Method], key: str) -> bool:
    field = method.model_fields.get(key)
    return field is not None and _names_a_method(field.annotation)


def _names_a_method(annotation: Any) -> bool:
    inside = get_args(annotation)
    return any(map(_names_a_method, inside)) or (isinstance(annotation, type) and issubclass(annotation, Method))


def _written(method: type[Method], key: str, value: Any) -> str:
    """A value such that ``from_shorthand`` gives it back."""
    if isinstance(value, Mapping) and "method" in value and _takes_an_encoding(method, key):
        inner = to_shorthand(value)
        return f"({inner})" if MARK.search(inner) else inner
    plain = isinstance(value, str) and value == value.strip() != "" and not MARK.search(value)
    return value if plain and _value(value) == value else json.dumps(value)


def _fields_of_a_bare_value(method: type[Method]) -> list[str]:
    """The method's required fields, its own ones, or its only one: a bare value means the first of them."""
    fields = {key: field for key, field in method.model_fields.items() if key != "method"}
    required = [key for key, field in fields.items() if field.is_required()]
    own = [key for key in method.__annotations__ if key in fields]
    return [*required, *own] or (list(fields) if len(fields) == 1 else [])


def _value(text: str, key: str = "") -> Any:
    """JSON or the text itself. NaN and infinity stay text: validation refuses them.

    Raises:
        PydanticCustomError: by ``problem``, for JSON of the field ``key`` that no request may have.
    """
    try:
        return read_json(text, constant=str)
    except PydanticCustomError as error:
        if error.type == NOT_JSON:
            return text
        raise problem(error.type, error.message(), f"{key}.{(error.context or {})['field']}".strip(".")) from None


def label_of(method: Method) -> str:
    """Short name for tables and legends: the method and the parameters that were set.

    It is a short form, but for a parameter with many numbers. The label has the begin of its SHA-256, so labels of
    different lists differ.
    """
    given = method.model_dump(exclude_unset=True)
    chosen = method.model_dump(exclude={"method", *method.unlabelled}, exclude_defaults=True)
    shown = [f"{name}={_written(type(method), name, _brief(given[name]))}" for name in chosen]
    return f"{method.method}({', '.join(shown)})" if shown else method.method


def _brief(value: Any) -> Any:
    """A parameter's value: 4 for 4.0, and temperatures in their short form, also those of an encoding inside."""
    if isinstance(value, tuple):
        return f"#{hashlib.sha256(json.dumps(value).encode()).hexdigest()[:6]}"
    if not isinstance(value, Mapping):
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e16 else value
    return to_short_form({name: _brief(inside) for name, inside in value.items()})
