"""Token ids of answers that come part by part, in the fields of vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.api.generation.pieces import Piece

OptionalIds = Annotated[list[int] | None, Field(exclude_if=lambda ids: ids is None)]
"""``prompt_token_ids`` or ``token_ids`` of an answer, which lacks the field unless the request asks for it."""


class TokenIds:
    """Ids of the tokens of one answer. A token comes with its text, and one without text at the end."""

    def __init__(self) -> None:
        self._sent = 0

    def take(self, piece: Piece, *, final: bool) -> list[int]:
        """Those of the next ``piece``; the last one is ``final``."""
        ids = piece.generation.token_ids
        start, self._sent = self._sent, len(ids) if final else min(self._sent + len(piece.tokens), len(ids))
        return ids[start : self._sent]
