"""Schemas as grammars have them: closed objects, formats that are annotations, white space, and many keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from service.models.text.closed_schemas import closed
from service.models.text.grammar_text import ONE_LINE, of_schema, tried
from service.models.text.json_schemas import ENFORCED_FORMATS, referred
from tests.grammars import follows

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
DEFS = {"A": A, "B": B}
ANCHORED = {name: {**schema, "$anchor": name} for name, schema in DEFS.items()}
EITHER: dict[str, Any] = {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}

CLOSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": (A, '{"a":1}', '{"a":1,"x":1}'),
    "no properties": ({"type": "object"}, "{}", '{"x":1}'),
    "no type": ({"properties": {"a": {}}}, "{}", '{"x":1}'),
    "or null": ({**A, "type": ["object", "null"]}, "null", '{"a":1,"x":1}'),
    "its own word": ({**A, "additionalProperties": {"type": "null"}}, '{"a":1,"x":null}', '{"a":1,"x":1}'),
    "items": ({"items": A, "type": "array"}, '[{"a":1}]', '[{"a":1,"x":1}]'),
    "first items": ({"prefixItems": [A], "type": "array"}, '[{"a":1}]', '[{"a":1,"x":1}]'),
    "other keys": ({"additionalProperties": A}, '{"x":{"a":1}}', '{"x":{"a":1,"x":1}}'),
    "any of": ({"anyOf": [A, B]}, '{"b":1}', '{"b":1,"x":1}'),
    "any of, typed": ({"type": "object", "anyOf": [A, B]}, '{"b":1}', '{"b":1,"x":1}'),
    "any of, beside keys": (EITHER, '{"b":1}', '{"b":1,"x":1}'),
    "one of": ({"oneOf": [A, {"type": "null"}]}, '{"a":1}', '{"a":1,"x":1}'),
    "all of one": ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": DEFS}, '{"a":1}', '{"a":1,"x":1}'),
    "a name": ({"$ref": "#/$defs/A", "title": "x", "$defs": DEFS}, '{"a":1}', '{"a":1,"x":1}'),
    "a place": ({"items": {"$ref": "#/c/A~1b"}, "type": "array", "c": {"A/b": A}}, '[{"a":1}]', '[{"a":1,"x":1}]'),
    "an anchor": ({"$ref": "#A", "$defs": ANCHORED}, '{"a":1}', '{"a":1,"x":1}'),
    "itself": ({"properties": {"a": {"$ref": "#"}}}, '{"a":{"a":{}}}', '{"a":{"x":{}}}'),
}
"""A schema, a text that is valid once it is closed, and one that is not."""

OPEN: dict[str, dict[str, Any]] = {
    "all of": {"allOf": [A, B]},
    "all of names": {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": DEFS},
    "all of anchors": {"allOf": [{"$ref": "#A"}, {"$ref": "#B"}], "$defs": ANCHORED},
    "all of, below": {"allOf": [{"anyOf": [A, {"$ref": "#/$defs/A"}]}, B], "$defs": DEFS},
    "beside keys": {**A, "allOf": [B]},
    "any of, beside keys": {**A, "anyOf": [B, {**B, "title": "x"}]},
    "a name beside keys": {**A, "$ref": "#/$defs/B", "$defs": DEFS},
}
"""Schemas of objects with two keys, each in a schema that does not know the other."""


@pytest.mark.parametrize("name", CLOSED)
def test_closed_objects_have_no_further_keys(name: str) -> None:
    schema, right, wrong = CLOSED[name]
    before = json.dumps(schema)
    grammar = of_schema(closed(schema, bare=True))
    assert follows(grammar, right)
    assert not follows(grammar, wrong)
    assert json.dumps(schema) == before


LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "a key": ({**A, "required": ["a", "x"]}, '{"a":1,"x":1}'),
    "a key below": ({"properties": {"in": {**A, "required": ["x"]}}, "required": ["in"]}, '{"in":{"x":1}}'),
    "all of": ({"allOf": [A, {"required": ["x"]}]}, '{"a":1,"x":1}'),
    "a name": ({"$ref": "#/$defs/A", "required": ["x"], "$defs": DEFS}, '{"a":1,"x":1}'),
    "any of": ({**EITHER, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, '{"y":1}'),
    "one key at least": ({"properties": {}, "minProperties": 1}, '{"x":1}'),
    "a constant": ({"properties": {"a": {}}, "const": {"a": 1, "x": 1}}, '{"a":1,"x":1}'),
    "no properties": ({"type": "object"}, '{"x":1}'),
}
"""Schemas that need keys which they do not list, and a text that has them."""


@pytest.mark.parametrize("name", LACKING)
def test_schemas_that_need_other_keys_stay_open_unasked(name: str) -> None:
    schema, text = LACKING[name]
    assert follows(of_schema(closed(schema, bare=False)), text)


def test_the_needs_of_one_alternative_open_no_other() -> None:
    grammar = of_schema(closed({"anyOf": [A, {**B, "required": ["b", "x"]}, {**B, "minProperties": 2}]}, bare=False))
    assert follows(grammar, '{"a":1}')
    assert follows(grammar, '{"b":1,"x":1}')
    assert not follows(grammar, '{"a":1,"x":1}')


@pytest.mark.parametrize("name", sorted(CLOSED.keys() - {"no properties"}))
def test_all_others_are_closed_unasked(name: str) -> None:
    schema, right, wrong = CLOSED[name]
    grammar = of_schema(closed(schema, bare=False))
    assert follows(grammar, right)
    assert not follows(grammar, wrong)


@pytest.mark.parametrize("name", OPEN)
def test_schemas_that_join_stay_open(name: str) -> None:
    assert follows(of_schema(closed(OPEN[name], bare=True)), '{"a":1,"b":1}')
    inner = {"items": OPEN[name] if "$defs" not in OPEN[name] else {}, "type": "array"}
    assert tried(of_schema(closed(inner, bare=True)), "") == ""


def test_a_schema_may_be_nested_deeply() -> None:
    """Pairs that refer to each other would take squares of time, and depth a stack."""
    schema: dict[str, Any] = A
    for _ in range(300):
        schema = {"anyOf": [schema]}
    assert json.dumps(closed(schema, bare=True)).count("additionalProperties") == 1
    names = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, A]} for n in range(600)}
    assert json.dumps(closed({"$ref": "#/$defs/d0", "$defs": names}, bare=True)).count("additionalProperties") == 600


@pytest.mark.parametrize("name", sorted(ENFORCED_FORMATS))
def test_known_formats_are_enforced(name: str) -> None:
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    assert tried(grammar, "") == "", "the library knows it"
    assert not follows(of_schema({"type": "string", "format": name}), '"no such thing:"')


@pytest.mark.parametrize("name", ["password", "path", "binary", "byte", "regex", "uri-reference", "x"])
def test_other_formats_are_annotations(name: str) -> None:
    texts = {"anyOf": [{"type": "string", "format": name, "minLength": 2}, {"type": "null"}]}
    grammar = of_schema({"properties": {"format": texts}, "required": ["format"]})
    assert follows(grammar, '{"format":"ab"}')
    assert not follows(grammar, '{"format":"a"}')


@pytest.mark.parametrize(("indent", "depth"), [(None, 40), (1, 30), (2, 15), (4, 7), ("\t", 30)])
def test_pretty_json_is_valid_at_any_sensible_depth(indent: Any, depth: int) -> None:
    grammar = of_schema({})
    deep: Any = None
    for level in range(depth):
        deep = {"a": deep, "b": {}} if level else {"a": 1}
    assert follows(grammar, json.dumps(deep, indent=indent))
    assert follows(grammar, '{ "a": 1 }')
    for wrong in ('{  "a": 1}', '{\n\n"a": 1}', '{ \n"a": 1}'):
        assert not follows(grammar, wrong), wrong


def test_one_line() -> None:
    grammar = of_schema({}, ONE_LINE)
    assert follows(grammar, '{"a": [1, 2]}')
    for wrong in ('{"a":[1,2]}', '{ "a": [1, 2]}', '{"a": [1,\n2]}'):
        assert not follows(grammar, wrong), wrong


def test_an_object_may_have_many_optional_keys() -> None:
    grammar = of_schema({"type": "object", "properties": {f"key_{n}": {} for n in range(490)}})
    assert follows(grammar, '{"key_3":1,"key_480":[2]}')


@pytest.mark.parametrize("index", ["1" * 5000, "7"])
def test_an_index_beyond_a_list_leads_nowhere(index: str) -> None:
    """Python refuses to convert very long ones."""
    assert referred({"anyOf": [{}]}, {"$ref": f"#/anyOf/{index}"}) is None
    assert referred({"anyOf": [{"type": "null"}]}, {"$ref": "#/anyOf/0"}) == (("anyOf", "0"), {"type": "null"})
