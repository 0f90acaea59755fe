"""Texts of grammars for llguidance, and their trial. Child processes import this file, so it loads no model library."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

AT_MOST_20_BLANKS = r"[\x20\x0A\x0D\x09]{1,20}"
"""White space between parts of JSON. A weak model would write nothing else without a limit."""

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it by default."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_items_in_row=500,
    step_max_items=5_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""A tenth of the library's, about: by those, masks of one answer may hold the generation thread for seconds."""

STACK_BYTES = 4 << 20
"""Stack for a trial: half of what a thread has. The library ends the process where a stack is too small."""

MOST_S = 3.0
"""Seconds for a trial."""


class Delimiter(NamedTuple):
    """A text, and its ``token`` if that is no text to the library."""

    text: str
    token: int | None = None

    def __str__(self) -> str:
        """The delimiter in a grammar. A model may spell it with other tokens, too."""
        spelt = json.dumps(self.text)
        return spelt if self.token is None else f"(<[{self.token}]> | {spelt})"


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


def of_regex(expression: str) -> str:
    """The grammar of texts that match ``expression``."""
    return grammar_from("regex", expression)


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of exactly one of ``choices``."""
    return grammar_from("choice", json.dumps(choices))


class Listing(NamedTuple):
    """Calls as JSON: texts before, between and behind them, and the name of their ``arguments``."""

    before: str = "["
    between: str = ", "
    behind: str = "]"
    arguments: str = "arguments"


LIST = Listing()


def of_calls(functions: Mapping[str, Mapping[str, Any]], *, several: bool, listing: Listing = LIST) -> str:
    """The grammar of calls as JSON, one at least: ``functions`` are names and schemas of arguments.

    Each schema stays a document, so its references hold.

    Raises:
        GrammarRefused: for a schema of something else than objects.
    """
    before, between, behind = (json.dumps(text) if text else "" for text in listing[:3])
    more = f"({between} call)*" if several else ""
    rules = [f"start: {before} call {more} {behind}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions.items()):
        if schema.get("type", "object") != "object":
            raise GrammarRefused(f"the arguments of {name!r} are no object")
        begin = json.dumps(json.dumps({"name": name, listing.arguments: None}).removesuffix("null}"))
        own = json.dumps({"x-guidance": ONE_LINE, **schema, "type": "object"})
        rules += [f'call_{number}: {begin} arguments_{number} "}}"', f"arguments_{number}: %json {own}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def either(grammar: str, calls: str) -> str:
    """A text by one of two grammars."""
    return json.dumps(
        {"grammars": [{"lark_grammar": "start: @form | @calls"}, *_named("form", grammar), *_named("calls", calls)]}
    )


def among(grammar: str, thought: tuple[Delimiter, Delimiter] | None, call: Delimiter | None, *, begun: bool) -> str:
    """``grammar`` behind reasoning, or a call in the model's own form in its place.

    ``thought`` are the delimiters of reasoning, which the prompt has ``begun`` or the answer may have. A ``call``
    begins with its delimiter. None is for a model without such a part.
    """
    rules = ["start: " + ("" if thought is None else "thought " if begun else "(opens thought)? ") + "answer"]
    rules.append("answer: BLANKS? (@own" + ("" if call is None else f" | {call} ANY?") + ")")
    rules += ["ANY: /(?s:.+)/", r"BLANKS: /[ \n]{1,8}/"]
    if thought is not None:
        opens, closes = thought
        spelt = json.dumps(closes.text)
        by_token = "" if closes.token is None else f" | UNCLOSED? <[{closes.token}]>"
        rules += [f"opens: BLANKS? {opens}", f"thought: closed{by_token}", f"closed[suffix={spelt}]: /(?s:.*)/"]
        rules += [f"UNCLOSED: ANY & ~(/(?s:.*)/ {spelt} /(?s:.*)/)"]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *_named("own", grammar)]})


def _named(name: str, grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar, the first of them with a name."""
    first, *rest = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return [{**first, "name": name}, *rest]


class _Bytes:
    """A tokenizer of bytes: a trial needs no model."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]  # noqa: RUF012 - the library reads it
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def tried(grammar: str) -> str:
    """The problem of ``grammar``, or nothing. For a child process: a hostile one may end it, or take hours."""
    found = list[str]()

    def compile_it() -> None:
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        found.append(matcher.get_error().partition("\n<")[0])

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it, daemon=True)
    thread.start()
    thread.join(MOST_S)
    return found[0] if found else f"it takes more than {MOST_S:g} seconds to compile"
