"""Refusals of structured outputs: the field that asks for a form, and the reason.

The library's errors show the grammar that it was given, which the client never wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from service.api.generation.structure import TOOLS, Structure
from service.engine.request import GrammarFailed
from service.errors import bad_request
from service.models.text.grammar_text import GrammarRefused
from service.models.text.json_schemas import places_of
from service.sharing.workers import ChildFailed

MAX_SHOWN = 64
"""Characters of an expression that are repeated."""

INSIDE = re.compile(r"\n *<.*|\n *\d+ \| .*", re.DOTALL)
"""The state of the library's parser, and its listing of the grammar."""

OF_FUNCTION = re.compile(r"\Aat (\d+)\(.*^ *\1 \| arguments_(\d+):", re.DOTALL | re.MULTILINE)
"""A place in the grammar of a function's arguments, and the listing of its line."""

BEFORE = re.compile(
    r'\A(?:at \d+\(\d+\): |invalid regex ".*" \(in regex\): |failed to compile JSON schema: |\w+ [Ee]rror: )+'
)
"""Words before a reason: a place in the grammar, and steps of the library."""

EXPRESSIONS = (
    re.compile(r"regex parse error:\n {4}(?P<expression>.*)\n[ ^]*\nerror: (?P<reason>.*)"),
    re.compile(r"(?P<reason>.*) in regex /(?P<expression>.*)/"),
)
"""Errors of a regular expression, which may be a pattern in a schema."""

UNENFORCED = re.compile(r"Unimplemented keys: (\[.*?\])")
"""Keys of JSON Schema that the library knows of, and does not have."""

IN_PLAIN_WORDS = {
    "lookarounds not supported": r"look-around such as \b is not supported",
    "too many expressions": "the form is too large to follow",
    "Current row has": "the form has too many continuations at one place: have fewer optional keys or choices",
    "NoExtensionBias": "no text has this form",
    "Unsatisfiable schema": "no JSON fits it; objects have the keys of properties alone, unless strict is false",
    "Value is not JSON serializable": "a count of the form has more than 64 bits",
    "oneOf constraints are not supported": "oneOf is not supported, unless its schemas exclude each other; anyOf is",
}
"""Reasons by the first words of the library's."""


@contextmanager
def refused(structure: Structure | None) -> Iterator[None]:
    """Inside, errors of the form ``structure`` become refusals of its field.

    Raises:
        ApiError: when the form cannot be compiled, or the answer cannot go on by it.
    """
    param = "" if structure is None else structure.param
    try:
        yield
    except ChildFailed as error:
        raise bad_request(f"{param}: too large to compile", param) from error
    except GrammarRefused as error:
        param, why = _within(structure, str(error))
        raise bad_request(f"{param}: {why}", param) from error
    except GrammarFailed as error:
        message = f"{param}: the answer cannot go on by it: {reason(str(error))}"
        raise bad_request(message, param, "grammar_failed") from error


def _within(structure: Structure | None, error: str) -> tuple[str, str]:
    """The field and the reason of a refusal. It names a function and keys by their paths."""
    if structure is None:
        return "", reason(error)
    param, before, schema = structure.param, "", structure.schema
    if structure.functions and (found := OF_FUNCTION.search(error)):
        name, schema = list(structure.functions.items())[int(found[2])]
        param, before = TOOLS, f"the parameters of {name!r}: "
    said = reason(error)
    if schema is not None and (keys := UNENFORCED.match(said)):
        places = places_of(schema, json.loads(keys[1]))
        said = f"{' and '.join(places)} cannot be enforced; leave {'it' if len(places) == 1 else 'them'} out"
    return param, f"{before}{said}"


def reason(error: str) -> str:
    """The reason in an error of the library, in plain words as far as they are known here."""
    said = BEFORE.sub("", INSIDE.sub("", error))
    for form in EXPRESSIONS:
        if found := form.fullmatch(said):
            return f"the expression '{found['expression'][:MAX_SHOWN]}' is refused: {_plain(found['reason'])}"
    return _plain(said)


def _plain(said: str) -> str:
    known = (plain for words, plain in IN_PLAIN_WORDS.items() if said.startswith(words))
    return next(known, " ".join(said.split()))
