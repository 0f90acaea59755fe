"""Single tokens as text and as bytes. A token can be a part of a character."""

from __future__ import annotations

from itertools import count
from typing import Any

from service.api.generation.text import BYTE
from service.models.text.tokenizing import WORD_START


def _byte_level() -> dict[str, int]:
    """Byte of each letter in which byte-level BPE spells tokens (GPT-2, encoder.py, ``bytes_to_unicode``)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = count(256)
    return {chr(byte if byte in shown else next(others)): byte for byte in range(256)}


BYTE_LEVEL = _byte_level()


class TokenNames:
    """Token ids as text, one at a time; remembered, since the same few come again and again."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._name(token_id)
        return self._known[token_id]

    def bytes_of(self, token_id: int) -> list[int] | None:
        """UTF-8 bytes of the token, also of a part of a character; None for an unknown spelling of such a part."""
        if "\ufffd" not in self._tokenizer.decode([token_id]):
            return list(self(token_id).encode())
        spelled = self._spelled(token_id)
        return None if spelled is None else list(spelled)

    def _spelled(self, token_id: int) -> bytes | None:
        """Bytes by the vocabulary's spelling; None for an unknown one."""
        spelling = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if byte := BYTE.fullmatch(spelling):
            return bytes([int(byte[1], 16)])
        return bytes(BYTE_LEVEL[letter] for letter in spelling) if set(spelling) <= BYTE_LEVEL.keys() else None

    def _name(self, token_id: int) -> str:
        text = str(self._tokenizer.decode([token_id]))
        raw = self._tokenizer.convert_ids_to_tokens(token_id)
        if raw is None:
            return text
        if "\ufffd" in text:
            spelled = self._spelled(token_id)
            return str(raw) if spelled is None else _shown(spelled)
        # Decoding a single token drops its leading space.
        return f" {text}" if raw.startswith(WORD_START) and not text.startswith(" ") else text


def _shown(spelled: bytes) -> str:
    """The text of ``spelled``, or OpenAI's form of a part of a character, such as ``bytes:\\xc3``."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return f"bytes:{repr(spelled)[2:-1]}"
