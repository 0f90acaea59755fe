"""Answers read while they come: text, reasoning, and calls of functions."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

REASONING = {"reasoning_content", "thinking"}
"""Fields of response templates for a model's reasoning."""


@dataclass(frozen=True)
class Call:
    """``arguments`` is an object as JSON."""

    name: str
    arguments: str

    @classmethod
    def of(cls, name: Any, arguments: Any) -> Call:
        return cls(str(name), arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


@dataclass(frozen=True)
class Said:
    """A part of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Reader(ABC):
    """Turns the raw text of one answer into what it says."""

    @abstractmethod
    def take(self, raw: str, *, final: bool) -> Said:
        """The next piece; the last one is ``final``."""


class PlainReader(Reader):
    """All of an answer is text."""

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        return Said(raw)


class ForcedReader(Reader):
    """The answer is a list of calls as JSON, by a grammar. One that is cut off is text."""

    def __init__(self) -> None:
        self._raw = ""

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        self._raw += raw
        if not final:
            return Said()
        try:
            calls = json.loads(self._raw)
        except ValueError:
            return Said(self._raw)
        return Said(calls=tuple(Call.of(call["name"], call["arguments"]) for call in calls))


class TemplateReader(Reader):
    """The answer is in the form of the model, which transformers' ``parser`` reads. A call that it cannot is text."""

    def __init__(self, parser: Any) -> None:
        self._parser, self._unparsed, self._failed = parser, "", False

    @override
    def take(self, raw: str, *, final: bool) -> Said:
        if self._failed:
            return Said(raw)
        try:
            events = self._parser.feed(raw)
            if final:
                events += self._parser.finalize()[1]
        except (KeyError, TypeError, ValueError):
            self._failed = True
            return Said(self._unparsed + raw)
        text = reasoning = ""
        calls: list[Call] = []
        for event in events:
            field, chunk = event["field"], event.get("text", "")
            if event["type"] == "region_open":
                self._unparsed = ""
            elif event["type"] == "region_close" and field == "tool_calls":
                found = event["value"] if isinstance(event["value"], list) else [event["value"]]
                calls += [Call.of(call["function"]["name"], call["function"]["arguments"]) for call in found]
                self._unparsed = ""
            elif field in REASONING:
                reasoning += chunk
            elif field == "content":
                text += chunk
            else:
                self._unparsed += chunk
        return Said(text, reasoning, tuple(calls))
