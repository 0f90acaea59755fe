"""Incremental detokenization: no half characters, and nothing past a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

CONTEXT = 6
"""Tokens of a prompt that the first one of an answer is read with."""

MOST_SILENT = 64
"""Tokens without text that are decoded again with the next one."""

LONGEST = 4
"""Bytes of a character."""

BYTE = re.compile("<0x([0-9A-F]{2})>")
"""SentencePiece's spelling of a byte."""


class TextStream:
    """Detokenizes a growing list of token ids, which follow those of ``context``.

    Decodes from a few tokens back, since a token's text can depend on its neighbours: Llama 2 drops the space before a
    first word. Withholds incomplete characters, and text that could begin a stop string. A stop string counts when it
    ends after the text of the first ``min_tokens`` tokens, as in vLLM (``IncrementalDetokenizer.update``). It is left
    out unless the text comes ``with_stop``.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        context: Sequence[int] = (),
        *,
        with_special_tokens: bool = False,
        with_stop: bool = False,
    ) -> None:
        self._with_stop = with_stop
        self._skips = not with_special_tokens
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._min_tokens, self._context = min_tokens, list(context[-CONTEXT - LONGEST :])
        self._prefix, self._read = self._begun_character() or self._start(-min(len(context), CONTEXT), []), 0
        self._sent = self._begin = 0
        self.text = ""
        self._withheld = 0
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """True if the stop string ``stop`` has ended the text."""
        return self.stop is not None

    @property
    def shown(self) -> int:
        """Characters of ``text`` that have been given out."""
        return self._sent

    @property
    def end(self) -> int:
        """The character behind ``text`` and the text that waits for the rest of its last character, which is one."""
        return len(self.text) + self._withheld

    def push(self, token_ids: Sequence[int], *, final: bool) -> str:
        """Take all tokens so far; returns the text that may be shown now and was not before."""
        if self.stopped:
            return ""
        if self._read < self._min_tokens < len(token_ids):
            before_stops = self.push(token_ids[: self._min_tokens], final=False)
            self._min_tokens = 0  # they are read, but for a character that is not complete
            return before_stops + self.push(token_ids, final=final)
        before, after = self._decode(token_ids, self._read), self._decode(token_ids, len(token_ids))
        added = _added(before, after)
        is_whole = final or not after.endswith("\ufffd")
        self._withheld = 0 if is_whole else len(added.rstrip("\ufffd")) + 1
        if is_whole:
            self.text += added
            # A word behind a special token that is skipped would be the first one, which has no space.
            if added or len(token_ids) - self._prefix > MOST_SILENT:
                self._prefix = self._start(self._read, token_ids)
            self._read = len(token_ids)
        if len(token_ids) <= self._min_tokens:
            self._begin = len(self.text)
        return self._release(final)

    def _release(self, final: bool) -> str:
        starts = [(self.text.find(stop, max(0, self._begin + 1 - len(stop))), stop) for stop in self._stop]
        found = [start for start in starts if start[0] >= 0]
        if found:
            at, self.stop = min(found)
            self.text = self.text[: at + len(self.stop) if self._with_stop else at]
        end = len(self.text)
        if not (final or self.stopped or self._with_stop):
            end -= max((_overlap(self.text, stop) for stop in self._stop), default=0)
        end = max(end, self._sent)
        shown, self._sent = self.text[self._sent : end], end
        return shown

    def _decode(self, token_ids: Sequence[int], stop: int) -> str:
        """Text of ``token_ids`` from ``_prefix`` to ``stop``."""
        before = self._context[self._prefix :] if self._prefix < 0 else []
        ids = [*before, *token_ids[max(0, self._prefix) : stop]]
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips)) if ids else ""

    def _start(self, place: int, token_ids: Sequence[int]) -> int:
        """``place``, or the start of the character that it lies in. Places below 0 are in the context.

        SentencePiece decodes bytes in a row as one, and gives none of their characters if one is not whole.
        """
        ids = [*self._context, *token_ids[: place + 1]] if place < LONGEST else token_ids
        behind = len(self._context) if place < LONGEST else 0
        for start in range(place, max(place - LONGEST, -behind - 1), -1):
            byte = self._byte(ids[behind + start]) if behind + start < len(ids) else None
            if byte is None or not 0x80 <= byte < 0xC0:
                return start
        return place

    def _begun_character(self) -> int | None:
        """The place of the context's last character, if that is not whole."""
        for place, token_id in zip(range(-1, -LONGEST, -1), reversed(self._context), strict=False):
            byte = self._byte(token_id)
            if byte is None or byte < 0x80:
                return None
            if byte >= 0xC0:  # it begins one of two bytes at least
                return place if -place < 2 + (byte >= 0xE0) + (byte >= 0xF0) else None
        return None

    def _byte(self, token_id: int) -> int | None:
        """The byte that a token of SentencePiece is, if it is one."""
        found = BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token_id)))
        return int(found[1], 16) if found else None


def _added(before: str, after: str) -> str:
    """The text that ``after`` has behind ``before``, or behind their common start: half a character can become one.

    SentencePiece decodes bytes in a row as one. If the last character is not whole, each of them is a replacement
    character, also those that were text before.
    """
    if after.startswith(before):
        return after[len(before) :]
    common = next(at for at, pair in enumerate(zip(before, after + "\0", strict=False)) if pair[0] != pair[1])
    shown = before[common:]
    return after[common + (0 if "\ufffd" in shown else len(shown.encode())) :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a start of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
