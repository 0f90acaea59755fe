"""Log-probabilities of the text of a response. Those of reasoning and of calls have no place in OpenAI's form."""

from __future__ import annotations

from service.api.generation.pieces import Piece, Token
from service.api.openai.tools.reading import Said


class TextTokens:
    """The tokens that the text of an answer is made of. A reader may hold text back until it knows its kind."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[Token]]] = []
        """Per piece the characters of its raw text, and its tokens."""

    def take(self, piece: Piece, said: Said) -> list[Token]:
        """Tokens of the text that is said now. The last ones may have no text, such as the token that ends it."""
        self._held.append((len(piece.text), piece.tokens))
        if not said.text and piece.finish_reason is None:
            return []
        missing, start = len(said.text), len(self._held)
        while start and (missing > 0 or not self._held[start - 1][0]):
            start -= 1
            missing -= self._held[start][0]
        found, self._held = self._held[start:], []
        return [token for _, tokens in found for token in tokens]
