"""The ``pe`` of an answer as a request: its parameters choose the encoding, its other numbers must follow from them.

An answer's ``pe`` has every parameter in effect and the numbers that follow from them. When a client sends it back, the
numbers are compared, so that an encoding cannot change unnoticed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

FOLLOWS = (
    "requested",
    "attention_factor",
    "effective_rope_theta",
    "rotates_at",
    "bands",
    "reserved_length",
    "frequency_hash",
    "layers",
)
"""Fields of an answer's ``pe`` that follow from its parameters."""

CHOSEN_FACTOR = "chosen_attention_factor"
"""An answer's name for the parameter ``attention_factor``, since the number in effect has that name."""


def set_apart(fields: Any, own: Container[str]) -> tuple[Any, dict[str, Any]]:
    """(fields that choose an encoding, fields that must follow) of a request for a method with the fields ``own``."""
    if not isinstance(fields, Mapping):
        return fields, {}
    taken = "attention_factor" in own and CHOSEN_FACTOR in fields
    names = {name for name in FOLLOWS if name in fields and (name not in own or taken)}
    chosen = {name: value for name, value in fields.items() if name not in names}
    if taken:
        chosen["attention_factor"] = chosen.pop(CHOSEN_FACTOR)
    return chosen, {name: fields[name] for name in FOLLOWS if name in names}


def renamed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in effect, by their names in an answer."""
    return {CHOSEN_FACTOR if name == "attention_factor" else name: value for name, value in parameters.items()}
