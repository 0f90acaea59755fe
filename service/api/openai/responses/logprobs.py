"""Log-probabilities of the text of a response. Those of reasoning and of calls have no place in OpenAI's form."""

from __future__ import annotations

from typing import NamedTuple

from service.api.generation.pieces import Piece, Token


class _Held(NamedTuple):
    """A piece whose tokens may still become text: its place in the raw text, and its tokens."""

    start: int
    stop: int
    tokens: list[Token]

    @property
    def is_silent(self) -> bool:
        """True if the piece has no text. Its tokens belong to the text that follows."""
        return self.start == self.stop

    def is_in(self, begin: int, end: int) -> bool:
        return self.start < end and self.stop > begin


class TextTokens:
    """The tokens that the text of an answer is made of. A reader may hold text back until it knows its kind."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._taken = 0

    def take(self, piece: Piece, text: str, behind: int) -> list[Token]:
        """Tokens of the ``text`` that is said now, with ``behind`` characters of raw text behind it.

        A piece goes with its first character that is said. At the end, tokens without text follow the last one.
        """
        start, self._taken = self._taken, self._taken + len(piece.text)
        self._held.append(_Held(start, self._taken, piece.tokens))
        is_last = piece.finish_reason is not None
        if not text and not is_last:
            return []
        end = self._taken - behind if text else self._taken
        begin = end - len(text)
        last = self._taken if is_last else end - 1  # place of a last token without text
        found = [
            held for held in self._held if held.is_in(begin, end) or (held.is_silent and begin <= held.stop <= last)
        ]
        self._held = [held for held in self._held if held.start >= end]
        return [token for held in found for token in held.tokens]
