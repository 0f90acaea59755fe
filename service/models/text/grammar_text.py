"""Texts of grammars for llguidance, and their trial. Child processes import this file, so it loads no model library."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from service.models.text.json_schemas import Node, without_annotations
from service.models.text.schema_numbers import problem_of_numbers

FLEXIBLE = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,32}"}
"""White space between parts of JSON: one blank, or one line break with an indentation.

A weak model would write nothing else without a limit.
"""

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it by default."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_items_in_row=2_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""A tenth of the library's, about: by those, masks of one answer may hold the generation thread for seconds.

A row has its own number, and a step two fifths: an object with 490 optional keys takes them.
"""

STACK_BYTES = 4 << 20
"""Stack for a trial: half of what a thread has. The library ends the process where a stack is too small."""

MOST_S = 3.0
"""Seconds for a trial."""


OPTIONS = "x-guidance"
"""A key of the library: a schema with it says how it is compiled. By it, answers need not be JSON."""


class GrammarRefused(ValueError):
    """A grammar that cannot be compiled, or a model that cannot follow any; the message says why."""


def of_schema(schema: Mapping[str, Any], options: Mapping[str, Any] = FLEXIBLE) -> str:
    """The grammar of JSON that is valid by ``schema``, with white space by ``options``.

    Raises:
        GrammarRefused: for parts of JSON Schema that the library does not have.
    """
    try:
        return LLMatcher.grammar_from_json_schema(enforced(schema), defaults=dict(options))  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarRefused(str(error)) from error


def enforced(schema: Mapping[str, Any]) -> Node:
    """``schema`` as the library takes it.

    Raises:
        GrammarRefused: for one that says how it is compiled, and for numbers that the library would change.
    """
    if OPTIONS in schema:
        raise GrammarRefused(f"the key {OPTIONS!r} is not supported; leave it out")
    made = without_annotations(schema)
    if problem := problem_of_numbers(made):
        raise GrammarRefused(problem)
    return made


def of_regex(expression: str) -> str:
    """The grammar of texts that match ``expression``."""
    return grammar_from("regex", expression)


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of exactly one of ``choices``."""
    return grammar_from("choice", json.dumps(choices))


class _Bytes:
    """A tokenizer of bytes: a trial needs no model."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012 - the library reads it
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tried(grammar: str, lead: str) -> str:
    """The problem of ``grammar`` at its start and behind the text ``lead``, or nothing.

    For a child process: a hostile one may end it, or take hours.
    """
    found = list[str]()

    def compile_it() -> None:
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0, limits=LIMITS)
        for text in ("", lead):
            if not matcher.is_error() and matcher.consume_tokens(list(text.encode())):
                matcher.compute_bitmask()
        found.append(matcher.get_error().partition("\n<")[0])

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    thread.join(MOST_S)
    return found[0] if found else f"it takes more than {MOST_S:g} seconds to compile"
