"""Numbers in schemas: exact in answers, or refused by their place."""

from __future__ import annotations

from typing import Any

import pytest

from service.models.text.grammar_text import GrammarRefused, of_schema
from tests.grammars import follows

SNOWFLAKE = 1234567890123456789
SAFE = (1 << 53) - 1

EXACT: list[tuple[dict[str, Any], str, str]] = [
    ({"const": SAFE}, str(SAFE), str(SAFE + 1)),
    ({"enum": [1, -SAFE]}, str(-SAFE), str(SAFE)),
    ({"const": {"a": [True, 2.5, 5e-22]}}, '{"a":[true,2.5,0.0000000000000000000005]}', '{"a":[true,2.5,0]}'),
    ({"const": 123456789.123456}, "123456789.123456", "123456789.123457"),
    ({"const": 123456789012345.0}, "123456789012345", "123456789012346"),
    ({"type": "integer", "exclusiveMinimum": SAFE}, str(SAFE + 1), str(SAFE)),
    ({"type": "integer", "exclusiveMaximum": -SAFE}, str(-SAFE - 1), str(-SAFE)),
    ({"type": "number", "minimum": 0, "maximum": SAFE}, f"{SAFE}.0", f"{SAFE}.5"),
    ({"default": SNOWFLAKE, "examples": [SNOWFLAKE], "type": "null"}, "null", "1"),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), EXACT, ids=lambda value: str(value)[:60])
def test_these_are_exact(schema: dict[str, Any], right: str, wrong: str) -> None:
    grammar = of_schema(schema)
    assert follows(grammar, right)
    assert not follows(grammar, wrong)


ROUNDED: list[tuple[dict[str, Any], str]] = [
    ({"const": SAFE + 1}, "const"),
    ({"const": -(10**30)}, "const"),
    ({"properties": {"id": {"enum": ["a", SNOWFLAKE]}}}, "properties.id.enum.1"),
    ({"const": {"a": [0, {"b": SNOWFLAKE}]}}, "const.a.1.b"),
    ({"items": {"$ref": "#/$defs/id"}, "$defs": {"id": {"minimum": SNOWFLAKE}}}, "$defs.id.minimum"),
    ({"anyOf": [{}, {"maximum": 1e16}]}, "anyOf.1.maximum"),
    ({"exclusiveMinimum": -(1 << 63)}, "exclusiveMinimum"),
    ({"exclusiveMaximum": 1e308}, "exclusiveMaximum"),
    ({"multipleOf": SNOWFLAKE}, "multipleOf"),
    ({"const": 123456789.12345679}, "const"),
    ({"const": 8096193613190580.0}, "const"),
    ({"const": 1.5e-22}, "const"),
]


@pytest.mark.parametrize(("schema", "place"), ROUNDED, ids=lambda value: str(value)[:60])
def test_others_are_refused_by_their_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(GrammarRefused) as refusal:
        of_schema(schema)
    assert str(refusal.value) == (
        f"{place} would be rounded: have integers within ±9007199254740991, and other numbers of at most 15 digits "
        "and 22 decimals. Larger ids can be strings"
    )


def test_a_length_is_within_the_range_of_the_library() -> None:
    assert follows(of_schema({"type": "string", "maxLength": (1 << 32) - 1}), '"a"')
    with pytest.raises(GrammarRefused, match=r"\Aitems\.minLength may be at most 4294967295\Z"):
        of_schema({"items": {"minLength": 1 << 32}})
