"""Numbers in JSON schemas as the grammar's library reads them: doubles, with one rounding for each power of ten."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from service.models.text.json_schemas import Node, Place, walk

NUMBERS = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keys of numbers that an answer is held to."""

LENGTHS = ("minLength", "maxLength")

MOST = (1 << 53) - 1
"""Integers up to here are interoperable (RFC 8259): doubles have each of them, and the next one."""

MOST_DIGITS, MOST_DECIMALS = 15, 22
"""Such numbers are a quotient of two exact doubles, which is rounded once."""

MOST_LENGTH = (1 << 32) - 1
"""The library's limit of a repetition."""

ROUNDED = (
    f"would be rounded: have integers within ±{MOST}, and other numbers of at most {MOST_DIGITS} digits and "
    f"{MOST_DECIMALS} decimals. Larger ids can be strings"
)


def problem_of_numbers(schema: Node) -> str:
    """The first number of ``schema`` that the library would change or cannot read, or nothing."""
    for place, node in walk(schema):
        for key in LENGTHS:
            if isinstance(length := node.get(key), int) and length > MOST_LENGTH:
                return f"{_path((*place, key))} may be at most {MOST_LENGTH}"
        for key in NUMBERS:
            for at, number in _numbers(node.get(key), (*place, key)):
                if not _is_exact(number):
                    return f"{_path(at)} {ROUNDED}"
    return ""


def _numbers(value: Any, place: Place) -> Iterator[tuple[Place, int | float]]:
    waiting = [(place, value)]
    while waiting:
        at, held = waiting.pop()
        if isinstance(held, int | float):
            yield at, held
        elif isinstance(held, dict | list):
            inner = held.items() if isinstance(held, dict) else enumerate(held)
            waiting += reversed([((*at, key), each) for key, each in inner])


def _is_exact(number: int | float) -> bool:
    if isinstance(number, int) or not abs(number) <= MOST:
        return abs(number) <= MOST
    _, digits, exponent = Decimal(repr(number).removesuffix(".0")).as_tuple()
    return len(digits) <= MOST_DIGITS and int(exponent) >= -MOST_DECIMALS


def _path(place: Place) -> str:
    return ".".join(map(str, place))
