"""Parts of an answer by a grammar that are the model's own: its reasoning, and its calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from service.models.text.grammar_text import ONE_LINE, OPTIONS, GrammarRefused, enforced


class Delimiter(NamedTuple):
    """A text, and its ``token`` if that is no text to the library. ``others`` are more such tokens."""

    text: str
    token: int | None = None
    others: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The delimiter in a grammar. A model may spell it with other tokens, too."""
        spelt = json.dumps(self.text)
        return spelt if self.token is None else f"(<[{self.token}]> | {spelt})"


Known = Callable[[str], Delimiter]
"""Delimiters as a model knows them; ``Delimiter`` itself is for trials, which know no model."""


class Listing(NamedTuple):
    """The form of calls: delimiters around them all and around each, and the text ``between`` two.

    A call is JSON with a name and ``arguments``, or with ``behind_name`` a bare name and that delimiter before them.
    """

    before: str = ""
    opens: str = ""
    closes: str = ""
    between: str = ", "
    arguments: str = "arguments"
    is_list: bool = False
    behind_name: str = ""


LIST = Listing(is_list=True)


def of_calls(
    functions: Mapping[str, Mapping[str, Any]], *, several: bool, listing: Listing = LIST, known: Known = Delimiter
) -> str:
    """The grammar of calls, one at least: ``functions`` are names and schemas of arguments.

    Each schema stays a document, so its references hold.

    Raises:
        GrammarRefused: for a schema of something else than objects, and as ``enforced``.
    """
    before, opens, closes = (str(known(text)) if text else "" for text in listing[:3])
    between = json.dumps(listing.between) if listing.between else "BLANKS?"
    calls = "call" + (f" ({between} call)*" if several else "")
    inner = "called" if listing.behind_name or not opens else "BLANKS? called BLANKS?"
    if listing.is_list:
        calls = f'"[" {calls} "]"'
    rules = [f"start: {before} BLANKS? {calls}" if before else f"start: {calls}", r"BLANKS: /[ \n]{1,8}/"]
    rules.append(f"call: {opens} {inner} {closes}")  # the library bounds what may come next: each function counts once
    rules.append("called: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, (name, schema) in enumerate(functions.items()):
        if schema.get("type", "object") != "object":
            raise GrammarRefused(f"the arguments of {name!r} are no object")
        try:
            taken = enforced(schema)
        except GrammarRefused as error:
            raise GrammarRefused(f"the parameters of {name!r}: {error}") from error
        if listing.behind_name:
            call = f"{json.dumps(name)} {known(listing.behind_name)} arguments_{number}"
        else:
            begin = json.dumps(json.dumps({"name": name, listing.arguments: None}).removesuffix("null}"))
            call = f'{begin} arguments_{number} "}}"'
        own = json.dumps({OPTIONS: ONE_LINE, **taken, "type": "object"})
        rules += [f"call_{number}: {call}", f"arguments_{number}: %json {own}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def either(grammar: str, calls: str) -> str:
    """A text by one of two grammars."""
    parts = [{"lark_grammar": "start: @form | @calls"}, *_named("form", grammar), *_named("calls", calls)]
    return json.dumps({"grammars": parts})


def behind_reasoning(grammar: str, opens: Delimiter, closes: Delimiter, *, begun: bool) -> str:
    """``grammar`` behind reasoning, which the prompt has ``begun`` or the answer may have, and behind line breaks."""
    before = "thought BREAKS? @own"
    rules = [f"start: {before}" if begun else f"start: @own | {opens} {before}", r"BREAKS: /\n{1,4}/"]
    spelt = json.dumps(closes.text)
    rules += [f"closed[suffix={spelt}]: /(?s:.*)/"]
    rules += [f"UNCLOSED: /(?s:.+)/ & ~(/(?s:.*)/ {spelt} /(?s:.*)/)"]
    if closes.token is None:
        rules.append("thought: closed")
    else:
        others = " | ".join(f"<[{token}]>" for token in closes.others)
        between = f"(UNCLOSED? ({others}))*" if others else ""
        rules.append(f"thought: {between} (closed | UNCLOSED? <[{closes.token}]>)")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *_named("own", grammar)]})


def _named(name: str, grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar, the first of them with a name."""
    first, *rest = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return [{**first, "name": name}, *rest]
