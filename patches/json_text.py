"""JSON that a client sends, as a body or as a text inside one, read by one set of rules.

Python's own reader takes more. It keeps the last of two equal keys, and halves of surrogate pairs. It reads as many
levels as the stack has room for.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from patches.problems import problem

MOST_VALUES = 1 << 18
"""Values in one text: parsing them holds the interpreter all the while, for a quarter of a microsecond each."""

MOST_STRINGS, MOST_FIELDS = 1 << 16, 1 << 14
"""Strings, and fields of all objects, in one text: they take ten times as long."""

MOST_LEVELS = 128
"""Lists and objects inside each other, as Rust's ``serde_json`` has it, which reads schemas after us."""

MOST_DIGITS = sys.get_int_max_str_digits()
"""Python converts no longer whole numbers, and its error is for programmers."""

NOT_JSON = "not_json"
"""The kind of the problem of a text that is something else."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Trail = tuple[Any, ...]
"""Empty, or the trail of the list or object around, and an index or key in it."""


def read_json(sent: str | bytes, constant: Callable[[str], Any] = float) -> Any:
    """The value of a text, or of bytes in UTF-8. ``constant`` makes that of NaN and infinity, which are no JSON.

    Raises:
        PydanticCustomError: by ``problem``, with the path of the part at fault, or for the whole.
    """
    twice: list[tuple[dict[str, Any], str]] = []

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice.append((found, repeated(name for name, _ in pairs)))
        return found

    try:
        # By itself, the library takes halves of surrogate pairs in bytes, and UTF-16.
        text = sent if isinstance(sent, str) else sent.decode("utf-8-sig")
        _check_counts(text)
        value = json.loads(text, object_pairs_hook=fields, parse_constant=constant)
    except RecursionError:
        raise _too_deep() from None
    except PydanticCustomError:
        raise
    except ValueError as error:
        raise problem(NOT_JSON, f"not valid JSON: {_reason(error)}") from None
    if text.count("[") + text.count("{") > MOST_LEVELS:
        check_levels(value)
    if SURROGATE.search(text):
        check_text(value)
    if twice:
        # An object that such a key has hidden comes before the object with this key.
        raise _given_twice(value, *twice[-1])
    return value


def check_levels(value: Any) -> None:
    """Raises:
    PydanticCustomError: for more lists and objects inside each other than ``MOST_LEVELS``.
    """
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [each for item in level for each in _inside(item) if type(each) is dict or type(each) is list]
    if level:
        raise _too_deep()


def check_text(value: Any) -> None:
    """Raises:
    PydanticCustomError: naming the field with half a surrogate pair, which cannot be written as UTF-8.
    """
    for item, trail in _places(value):
        if type(item) is str:
            try:
                item.encode()
            except UnicodeEncodeError as error:
                half = f"character {error.start + 1} is half a surrogate pair"
                raise problem("half_a_pair", half, path_of(trail)) from None


def count(text: str, mark: str) -> int:
    """Count of ``mark`` in JSON outside of strings: a comma between entries, a colon in every field. Small counts
    include strings."""
    found = text.count(mark)
    if found <= MOST_FIELDS:
        return found
    parts = text.replace("\\\\", "").replace('\\"', "").split('"')
    return sum(part.count(mark) for part in parts[::2])


def repeated(names: Iterable[str]) -> str:
    """The first of ``names`` that is among them twice."""
    counts = Counter(names)
    return next(name for name in counts if counts[name] > 1)


def path_of(trail: Trail) -> str:
    """The keys and indices of ``trail`` as a field, such as ``tools.0.function``."""
    keys = []
    while trail:
        trail, key = trail
        keys.append(str(key))
    return ".".join(reversed(keys))


def _check_counts(text: str) -> None:
    if text.count('"') - text.count('\\"') > 2 * MOST_STRINGS:
        raise problem("too_many_strings", f"may hold at most {MOST_STRINGS} strings")
    if count(text, ",") >= MOST_VALUES:
        raise problem("too_many_values", f"may hold at most {MOST_VALUES} values; send long documents as text")
    if count(text, ":") > MOST_FIELDS:
        raise problem("too_many_fields", f"may hold at most {MOST_FIELDS} fields of objects")


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error) if isinstance(error, UnicodeError) else f"a number has more than {MOST_DIGITS} digits"


def _too_deep() -> PydanticCustomError:
    return problem("nested", f"may be nested at most {MOST_LEVELS} levels deep")


def _given_twice(value: Any, fields: dict[str, Any], name: str) -> PydanticCustomError:
    trail = next(trail for item, trail in _places(value) if item is fields)
    return problem("given_twice", "is given twice in an object", path_of((trail, name)))


def _places(value: Any) -> Iterator[tuple[Any, Trail]]:
    """Each value and each key inside of ``value``, with its place, or the object's for a key."""
    found: list[tuple[Any, Trail]] = [(value, ())]
    while found:
        item, trail = found.pop()
        yield item, trail
        if type(item) is dict:
            # Keys come last, so they are checked before a trail has them.
            found += [(each, (trail, key)) for key, each in item.items()] + [(key, trail) for key in item]
        elif type(item) is list:
            found += [(each, (trail, index)) for index, each in enumerate(item)]


def _inside(item: Any) -> Any:
    if type(item) is dict:
        return item.values()
    return item if type(item) is list else ()
