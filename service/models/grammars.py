"""Grammars compiled for the tokens of a model, by llguidance: JSON schemas, regular expressions, Lark and GBNF."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer

from service.engine.request import Grammar, GrammarFailed

AT_MOST_20_BLANKS = r"[\x20\x0A\x0D\x09]{1,20}"
"""White space between parts of JSON. A weak model would write nothing else without a limit."""

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it by default."""

LIMITS = LLParserLimits(initial_lexer_fuel=100_000, verbose_errors=False)
"""With the library's million, one token of `((a{100}){100}){100}` takes two seconds; so it takes less than 0.1."""


class GrammarRefused(ValueError):
    """A grammar that cannot be compiled, or a model that cannot follow any; the message says why."""


def of_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that is valid by ``schema``.

    Raises:
        GrammarRefused: for parts of JSON Schema that the library does not have.
    """
    try:
        return LLMatcher.grammar_from_json_schema(dict(schema), defaults={"whitespace_pattern": AT_MOST_20_BLANKS})
    except ValueError as error:
        raise GrammarRefused(str(error)) from error


def of_text(kind: str, text: str) -> str:
    """The grammar that ``text`` is: of the ``kind`` ``regex``, or ``grammar`` for Lark and GBNF.

    Raises:
        GrammarRefused: for a GBNF that cannot be read.
    """
    try:
        return grammar_from(kind, text)  # type: ignore[arg-type]
    except ValueError as error:
        raise GrammarRefused(str(error)) from error


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of exactly one of ``choices``."""
    return grammar_from("choice", json.dumps(choices))


def of_calls(functions: Mapping[str, Mapping[str, Any]], *, several: bool) -> str:
    """The grammar of a JSON list of calls, one at least: ``functions`` are names and schemas of arguments.

    Each schema stays a document, so its references hold.
    """
    more = '(", " call)*' if several else ""
    rules = [f'start: "[" call {more} "]"']
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions.items()):
        begin = json.dumps(json.dumps({"name": name, "arguments": None}).removesuffix("null}"))
        own = json.dumps({"x-guidance": ONE_LINE, **schema})
        rules += [f'call_{number}: {begin} arguments_{number} "}}"', f"arguments_{number}: %json {own}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


class Grammars:
    """Compiles grammars for one model. ``eos_token_ids`` end an answer that is complete. Safe for threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()

    def compiled(self, grammar: str) -> Grammar:
        """``grammar``, one of the functions above made it, at the start of an answer.

        Nothing is remembered: copies of a compiled grammar share room, which answers use up.

        Raises:
            GrammarRefused: for a wrong or too large one, and for a model that cannot follow any.
        """
        with self._lock:
            tokens = self._tokens
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarRefused(matcher.get_error())
        compiled = Grammar(matcher, self._eos_token_ids)
        try:
            for _ in range(2):  # the first mask is the dearest; if it was too dear, the second one fails
                compiled.begun().allowed(self._vocab_size)
        except GrammarFailed as error:
            raise GrammarRefused(str(error)) from error
        return compiled

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """The tokenizer as the library sees it; about a second of work for 128,000 tokens."""
        if not self._eos_token_ids:
            raise GrammarRefused("the model has no end-of-text token, which ends an answer by a grammar")
        try:
            return from_tokenizer(self._tokenizer, self._vocab_size, self._eos_token_ids)
        except ValueError as error:
            raise GrammarRefused(f"the model's tokenizer cannot follow a grammar: {error}") from error
