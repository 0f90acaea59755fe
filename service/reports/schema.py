"""A JSON schema of parameters in a few words: types with their bounds, and defaults."""

from __future__ import annotations

import json
from typing import Any


def type_text(field: dict[str, Any]) -> str:
    """The type of a field, bounds included: ``number from 1 up to 4,096``."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return " or ".join(_one_type(kind) for kind in kinds) or "null"


def default_text(name: str, schema: dict[str, Any]) -> str:
    """``required``, or the default as JSON."""
    return "required" if name in schema.get("required", []) else json.dumps(schema["properties"][name].get("default"))


def field_rows(name: str, field: dict[str, Any], definitions: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of a field, and below an object its own fields, indented.

    ``definitions`` are the ``$defs`` of the schema that the field is of.
    """
    default = "" if field.get("default") is None else json.dumps(field["default"])
    meaning = field.get("description", "")
    if "$ref" in field:
        target = definitions[field["$ref"].rpartition("/")[2]]
        meaning = meaning or " ".join(target.get("description", "").replace("``", "").split())
        inside = [field_rows(f"  {key}", value, definitions) for key, value in target.get("properties", {}).items()]
        return [(name, "object", default, meaning), *(row for rows in inside for row in rows)]
    if "discriminator" in field.get("items", {}):
        return [(name, "list of names or objects", default, f"{meaning} One of: {', '.join(choices(field['items']))}.")]
    return [(name, "JSON" if "$ref" in json.dumps(field) else type_text(field), default, meaning)]


def choices(field: dict[str, Any]) -> list[str]:
    """Values of a field's discriminator: its methods or kinds; empty without one."""
    mappings = [kind["discriminator"]["mapping"] for kind in field.get("anyOf", [field]) if "discriminator" in kind]
    return [name for mapping in mappings for name in mapping]


def _one_type(kind: dict[str, Any]) -> str:
    if "discriminator" in kind:
        return f"object by {kind['discriminator']['propertyName']}"
    if "enum" in kind or "const" in kind:
        return " or ".join(kind.get("enum", [kind.get("const")]))
    name = kind.get("type", "value")
    if name == "array":
        first, *rest = _one_type(kind.get("items", {})).split(" ", 1)
        return " ".join([f"list of {first}s", *rest])
    low = kind.get("minimum", kind.get("exclusiveMinimum"))
    high = kind.get("maximum", kind.get("exclusiveMaximum"))
    above, below = "above" if "exclusiveMinimum" in kind else "from", "below" if "exclusiveMaximum" in kind else "up to"
    step = f", a multiple of {kind['multipleOf']}" if "multipleOf" in kind else ""
    bounds = [
        f"{above} {_number(low)}" if low is not None else "",
        f"{below} {_number(high)}" if high is not None else "",
    ]
    return " ".join(part for part in [name, *bounds] if part) + step


def _number(value: float) -> str:
    return f"{value:,.10g}" if 1e-4 < abs(value) < 1e9 or value == 0 else f"{value:g}"
