"""Schemas whose objects have no further keys, as OpenAI's ``strict`` has it.

Models that know no form write such keys until they are cut off. Servers such as llama.cpp close objects unasked, too.

``additionalProperties: false`` knows the properties beside it only. Two closed schemas of one object exclude each
other's keys, so no object is valid by both. Such schemas stay open: branches of ``allOf``, and those beside others.
Unasked, a schema also stays open where the value needs keys that it does not list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.models.text.json_schemas import Node, copied, referred, walk

KEYS = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
"""Keys by which a schema says which keys an object has."""

ANY_OTHER = "\0"

MOST_PAIRS = 1 << 18
"""Schemas and names of keys that they lack: beyond, every schema stays open."""


def closed(schema: Mapping[str, Any], *, bare: bool) -> Node:
    """``schema``, and ``additionalProperties: false`` for each object in it that does not say it itself.

    Without ``bare``, objects that list no ``properties`` stay open, and those that need more than they list.
    """
    made = copied(schema)
    nodes = [node for _, node in walk(made)]
    parts = {id(node): _parts(made, node) for node in nodes}
    with_keys = _with_keys(nodes, parts)
    given = {
        id(node): [part for part in parts[id(node)] if any(id(each) in with_keys for each in part)] for node in nodes
    }
    below = {key: [each for part in held for each in part] for key, held in parts.items()}
    opened = _reached([node for node in nodes if _says_keys(node) + len(given[id(node)]) > 1], below)
    if not bare:
        opened |= _lacking(nodes, parts)
    for node in nodes:
        says = "additionalProperties" in node or "unevaluatedProperties" in node
        takes_none = bare or "properties" in node
        if _is_of_objects(node) and takes_none and not says and id(node) not in opened and not given[id(node)]:
            node["additionalProperties"] = False
    return made


def _parts(schema: Node, node: Node) -> list[list[Node]]:
    """Other schemas of the same value: each part has those of which one applies, or all."""
    parts = [[each] for each in _dicts(node, "allOf")] + [_dicts(node, "anyOf"), _dicts(node, "oneOf")]
    if found := referred(schema, node):
        parts.append([found[1]])
    return [part for part in parts if part]


def _lacking(nodes: list[Node], parts: dict[int, list[list[Node]]]) -> set[int]:
    """Schemas by ``id`` that lack a key which the value needs by them, or by others that apply beside them.

    The needs of one alternative are none of another's.
    """
    needed = {id(node): _needed(node) - _listed(node) for node in nodes}
    names = set[str]().union(*needed.values())
    if len(names) * len(nodes) > MOST_PAIRS:
        return set(needed)
    up: dict[int, list[int]] = {key: [] for key in needed}
    down: dict[int, list[int]] = {key: [] for key in needed}
    for node in nodes:
        for part in parts[id(node)]:
            for each in part:
                down[id(node)].append(id(each))
                up[id(each)].append(id(node))
            if len(part) == 1:  # both apply
                down[id(part[0])].append(id(node))
                up[id(node)].append(id(part[0]))
    above, below = _carried(needed, down), _carried(needed, up)
    return {id(node) for node in nodes if (above[id(node)] | below[id(node)]) - _listed(node)}


def _carried(needed: dict[int, set[str]], onward: dict[int, list[int]]) -> dict[int, set[str]]:
    """The names that each schema has, and those that reach it."""
    found = {key: set(names) for key, names in needed.items()}
    waiting = [(key, name) for key, names in needed.items() for name in names]
    while waiting:
        key, name = waiting.pop()
        for other in onward[key]:
            if name not in found[other]:
                found[other].add(name)
                waiting.append((other, name))
    return found


def _needed(node: Node) -> set[str]:
    """Keys that a value has to have. ``ANY_OTHER`` is one more than those that are listed."""
    required, least = node.get("required"), node.get("minProperties")
    found = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    fixed = [node.get("const"), *(node["enum"] if isinstance(node.get("enum"), list) else [])]
    found.update(key for value in fixed if isinstance(value, dict) for key in value)
    more = isinstance(least, int | float) and least > len(_listed(node))
    return found | {ANY_OTHER} if more else found


def _listed(node: Node) -> set[str]:
    held = node.get("properties")
    return set(held) if isinstance(held, dict) else set()


def _dicts(node: Node, key: str) -> list[Node]:
    held = node.get(key)
    return [each for each in held if isinstance(each, dict)] if isinstance(held, list) else []


def _says_keys(node: Node) -> bool:
    return any(key in node for key in KEYS)


def _is_of_objects(node: Node) -> bool:
    given = node.get("type")
    return "object" in (given if isinstance(given, list) else [given]) or _says_keys(node)


def _with_keys(nodes: list[Node], parts: dict[int, list[list[Node]]]) -> set[int]:
    """Schemas of objects, and those that such a schema is a part of, by ``id``."""
    above: dict[int, list[Node]] = {id(node): [] for node in nodes}
    for node in nodes:
        for part in parts[id(node)]:
            for each in part:
                above[id(each)].append(node)
    return _reached([node for node in nodes if _is_of_objects(node)], above)


def _reached(waiting: list[Node], onward: dict[int, list[Node]]) -> set[int]:
    """``waiting`` and all behind them, by ``id``."""
    found = set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) not in found:
            found.add(id(node))
            waiting += onward[id(node)]
    return found
