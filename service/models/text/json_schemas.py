"""JSON schemas before they become grammars: their subschemas, and keys that the grammar's library does not enforce."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keys of several subschemas."""

NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of subschemas by names."""

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of texts that the library knows. JSON Schema has any other one as an annotation."""

Node = dict[str, Any]
Place = tuple[str | int, ...]


def copied(schema: Mapping[str, Any]) -> Node:
    """A copy to change. ``copy.deepcopy`` cannot nest as deeply as JSON may."""
    made: Node = json.loads(json.dumps(schema))
    return made


def walk(schema: Node) -> Iterator[tuple[Place, Node]]:
    """The schema and every other one in it, each with its place. No recursion: clients nest schemas as they like."""
    seen, waiting = set[int](), [(Place(), schema)]
    while waiting:
        place, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield place, node
        if found := referred(schema, node):
            waiting.append(found)
        waiting += reversed([((*place, *steps), each) for steps, each in _children(node)])


def _children(node: Node) -> Iterator[tuple[Place, Node]]:
    for key in ("items", "additionalItems", "additionalProperties", *LISTS, *NAMED):
        held = node.get(key)
        if isinstance(held, list):  # ``items`` is one in older drafts
            yield from (((key, at), each) for at, each in enumerate(held) if isinstance(each, dict))
        elif isinstance(held, dict) and key in NAMED:
            yield from (((key, name), each) for name, each in held.items() if isinstance(each, dict))
        elif isinstance(held, dict):
            yield (key,), held


MOST_DIGITS = 10
"""Digits of an index into a list, in a JSON pointer: Python converts a few thousand at most."""


def referred(schema: Node, node: Node) -> tuple[Place, Node] | None:
    """The place in ``schema`` that ``node`` refers to by a JSON pointer (RFC 6901) or ``$anchor``, and what it has
    there."""
    reference = node.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if reference not in ("#", "") and not reference.startswith("#/"):
        return _anchored(schema, reference[1:])
    place = [step.replace("~1", "/").replace("~0", "~") for step in unquote(reference[1:]).split("/")[1:]]
    found: Any = schema
    for step in place:
        if isinstance(found, list) and step.isdecimal() and len(step) < MOST_DIGITS and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
    return (tuple(place), found) if isinstance(found, dict) else None


def _anchored(schema: Node, name: str) -> tuple[Place, Node] | None:
    """The first definition of ``schema`` with this ``$anchor``."""
    for key in ("$defs", "definitions"):
        held = schema.get(key)
        for of, node in held.items() if isinstance(held, dict) else ():
            if isinstance(node, dict) and node.get("$anchor") == name:
                return (key, of), node
    return None


def without_annotations(schema: Mapping[str, Any]) -> Node:
    """``schema`` without formats that the library does not know: it would refuse them."""
    made = copied(schema)
    for _, node in walk(made):
        if isinstance(node.get("format"), str) and node["format"] not in ENFORCED_FORMATS:
            del node["format"]
    return made


def places_of(schema: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Paths of ``keys`` in the first schema that has them all, such as ``properties.tags.uniqueItems``."""
    for place, node in walk(dict(schema)):
        if all(key in node for key in keys):
            return [".".join(map(str, (*place, key))) for key in keys]
    return [*keys]
