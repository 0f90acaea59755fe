"""Answers read while they come: text, reasoning, and calls of functions."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from service.models.text.response_templates import REASONING

UNREADABLE = (KeyError, RecursionError, TypeError, ValueError)
"""Errors of a parser that a model's text causes."""


@dataclass(frozen=True)
class Call:
    """``arguments`` is an object as JSON."""

    name: str
    arguments: str

    @classmethod
    def of(cls, name: Any, arguments: Any) -> Call:
        """Raises:
        ValueError: for a name that is no text, and arguments that are no object of JSON.
        """
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(given, dict):
            raise ValueError("neither a name nor an object")
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        has_half_characters = text != text.encode("utf-8", "replace").decode("utf-8")
        return cls(name, json.dumps(given) if has_half_characters else text)


@dataclass(frozen=True)
class Said:
    """A part of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Reader(ABC):
    """Turns the raw text of one answer into what it says. ``has_thought``: its reasoning has ended.

    ``behind`` counts the characters of raw text behind the end of the text that is said so far.
    """

    has_thought = False
    behind = 0

    @abstractmethod
    def take(self, raw: str, *, final: bool) -> Said:
        """The next piece; the last one is ``final``."""


class PlainReader(Reader):
    """All of an answer is text."""

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        return Said(raw)


class FormedReader(Reader):
    """Reasoning, and then text by a form, without the line breaks between them.

    With ``calls``, that reader has a text which begins with ``begins``. Calls of other functions than ``names`` are
    text.
    """

    def __init__(
        self, thoughts: Reader, calls: Reader | None = None, begins: str = "", names: Iterable[str] = ()
    ) -> None:
        self._thoughts, self._calls, self._begins, self._names = thoughts, calls, begins, frozenset(names)
        self._held = self._taken = self._given = ""
        self._has_begun = False
        self._body: Reader | None = None if calls else PlainReader()

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        said = self._read(raw, final=final)
        self.behind = self._thoughts.behind + (self._body.behind if self._body else 0)
        return said

    def _read(self, raw: str, *, final: bool) -> Said:
        said = self._thoughts.take(raw, final=final)
        text = said.text
        if not self._has_begun:
            text = text.lstrip("\n") if self._thoughts.has_thought else text
            if text and isinstance(self._thoughts, TemplateReader):
                text += self._thoughts.stop()  # the form may contain the delimiters of reasoning
            self._has_begun = bool(text)
        text = self._held + text
        if self._body is None:
            assert self._calls is not None, "there is a choice"
            if self._begins.startswith(text) and text != self._begins and not final:
                self._held = text
                return Said(reasoning=said.reasoning)
            self._body = self._calls if text.startswith(self._begins) else PlainReader()
        self._held = ""
        found = self._body.take(text, final=final)
        if self._body is self._calls:
            self._taken, self._given = self._taken + text, self._given + found.text
        if any(call.name not in self._names for call in found.calls):
            self._body, found = PlainReader(), Said(self._taken.removeprefix(self._given))
        return replace(found, reasoning=said.reasoning + found.reasoning)


class ForcedReader(Reader):
    """The text that ``inner`` reads is a list of calls as JSON, by a grammar. A first call that is cut off is text."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self._raw = inner, ""

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        said = self._inner.take(raw, final=final)
        self._raw, self.behind = self._raw + said.text, self._inner.behind
        if not final:
            return Said(reasoning=said.reasoning)
        calls = _whole_calls(self._raw)
        return Said("" if calls else self._raw, said.reasoning, calls)


def _whole_calls(raw: str) -> tuple[Call, ...]:
    """The calls of a list that may be cut off, without one that is not whole."""
    calls: list[Call] = []
    at, decoder = 1, json.JSONDecoder()
    try:
        while raw.startswith("{", at):
            call, at = decoder.raw_decode(raw, at)
            calls.append(Call.of(call["name"], call["arguments"]))
            at += len(", ")
    except UNREADABLE:
        pass  # a call that is cut off
    return tuple(calls)


class TemplateReader(Reader):
    """The answer is in the form of the model, which transformers' ``parser`` reads. A call that it cannot is text.

    It gets one character at a time, so that the raw text behind each of its events is known. ``held`` characters of the
    prompt's end may come out of it with the answer. A last call without the pattern ``closes`` is cut off. With
    ``names``, calls of other functions are text.
    """

    def __init__(
        self, parser: Any, held: int = 0, closes: str | None = None, names: frozenset[str] | None = None
    ) -> None:
        self._parser, self._held, self._closes, self._names = parser, held, closes, names
        self._raw = ""
        """Raw text that has not come out yet."""
        self._failed = False

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        parts = []
        for letter in raw:
            parts.append(self._one(letter))
            self._place(parts[-1], self.behind + 1)
        if final:
            parts.append(self._end())
            self._place(parts[-1], self.behind)
        return Said(
            "".join(part.text for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(call for part in parts for call in part.calls),
        )

    def stop(self) -> str:
        """Read no more: the text that has not come out yet, and all that follows is text."""
        rest = Said() if self._failed else self._rest()
        self._place(rest, self.behind)
        return rest.text

    def _place(self, said: Said, otherwise: int) -> None:
        """Count what is behind the text that is ``said`` now: what has not come out, or ``otherwise`` without any."""
        if said.text:
            self.behind = 0 if self._failed else len(self._raw)
        else:
            self.behind = otherwise

    def _one(self, letter: str) -> Said:
        if self._failed:
            return Said(letter)
        self._raw += letter
        try:
            return self._said(self._parser.feed(letter))
        except UNREADABLE:
            return self._rest()

    def _end(self) -> Said:
        if self._failed:
            return Said()
        try:
            events = self._parser.finalize()[1]
            calls = any(event["field"] == "tool_calls" for event in events)
            if calls and self._closes is not None and not re.search(self._closes, self._raw):
                return self._rest()
            return self._said(events)
        except UNREADABLE:
            return self._rest()

    def _rest(self) -> Said:
        """All raw text that has not come out, as text; so is the text that follows."""
        self._failed = True
        return Said(self._raw)

    def _said(self, events: list[dict[str, Any]]) -> Said:
        text = reasoning = ""
        calls: list[Call] = []
        pending = self._raw
        for event in events:
            kind, field, chunk = event["type"], event["field"], event.get("text", "")
            if kind == "region_open":
                self._held = self._held if field == "content" else 0
            elif kind == "region_close" and field == "tool_calls":
                found = event["value"] if isinstance(event["value"], list) else [event["value"]]
                own_calls = [Call.of(call["function"]["name"], call["function"]["arguments"]) for call in found]
                if self._names is None or self._names.issuperset(call.name for call in own_calls):
                    calls += own_calls
                else:
                    text += pending
                pending = ""
            elif kind == "region_close" and field in REASONING:
                pending, self.has_thought = "", True
            elif kind == "region_chunk" and field in REASONING | {"content"}:
                own = chunk[min(self._held, len(chunk)) :]
                self._held -= len(chunk) - len(own)
                text, reasoning = (text + own, reasoning) if field == "content" else (text, reasoning + own)
                pending = pending.removeprefix(own) if field in REASONING else _behind(own, pending)
        self._raw = pending
        return Said(text, reasoning, tuple(calls))


def _behind(own: str, raw: str) -> str:
    """The part of ``raw`` behind a text. A template may strip the blanks before it."""
    return raw.partition(own)[2] if own and own in raw else raw
