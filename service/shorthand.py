"""Encodings in one word: ``yarn:4``, ``yarn:factor=4,beta_fast=16``, or the JSON object itself.

The grammar is ``method[:item,item...]`` with items ``key=value``. One item may be a bare value: it
sets the method's first required field, or its first own field where none is required. Values are
JSON where they parse as JSON and text otherwise. Nothing here checks values: ``patches.parse`` does.
"""

from __future__ import annotations

import json
import re
from typing import Any

from patches import METHODS, Method

LIST_OR_COMMA = re.compile(r"(\[[^\[\]]*\]|,)")


def from_text(text: str) -> dict[str, Any]:
    """Request fields from a JSON object or the short form.

    Raises:
        ValueError: when the text is neither; the message says what is wrong with it.
    """
    if not text.lstrip().startswith("{"):
        return from_shorthand(text)
    try:
        fields: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    return fields


def from_shorthand(text: str) -> dict[str, Any]:
    """Request fields from the short form, not validated.

    Raises:
        ValueError: for an unknown method, a key given twice, or a bare value that has no place.
    """
    name, colon, rest = text.strip().partition(":")
    method = METHODS.get(name)
    if method is None:
        raise ValueError(f"unknown method {name[:64]!r}: one of {', '.join(METHODS)}")
    fields: dict[str, Any] = {"method": name}
    if not colon:
        return fields
    for item in _items(rest):
        key, equals, value = item.partition("=")
        if not equals:
            key, value = _field_of_bare_value(name, method), item
        key, value = key.strip(), value.strip()
        if not key or not value:
            raise ValueError(f"{name}: {item[:64]!r} is not key=value")
        if key in fields:
            raise ValueError(f"{name}: {key[:64]!r} is given twice")
        fields[key] = _value(value)
    return fields


def _items(text: str) -> list[str]:
    """Split at the commas outside lists, in linear time whatever the text."""
    items: list[list[str]] = [[]]
    for piece in LIST_OR_COMMA.split(text):
        if piece == ",":
            items.append([])
        else:
            items[-1].append(piece)
    return ["".join(pieces) for pieces in items]


def _field_of_bare_value(name: str, method: type[Method]) -> str:
    required = [key for key, field in method.model_fields.items() if field.is_required()]
    own = [key for key in method.__annotations__ if key in method.model_fields and key != "method"]
    if not required and not own:
        raise ValueError(f"{name} takes no bare value: write key=value")
    return [*required, *own][0]


def _value(text: str) -> Any:
    """JSON or the text itself. NaN and infinity stay text: they are no JSON, and validation refuses them."""
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
