"""Grammars over tokens that are the characters of ASCII, for models of ``VOCAB_SIZE`` tokens."""

from __future__ import annotations

from typing import ClassVar

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from service.engine.request import Grammar
from tests.models import VOCAB_SIZE

END = 0
"""The token that ends an answer."""


class _Ascii:
    eos_token_id: ClassVar = END
    bos_token_id: ClassVar = None
    tokens: ClassVar = [bytes([token]) for token in range(VOCAB_SIZE)]
    special_token_ids: ClassVar = [END]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def letters(expression: str, ends: tuple[int, ...] = (END,)) -> Grammar:
    """Answers match the regular ``expression``."""
    tokens = LLTokenizer(TokenizerWrapper(_Ascii()), eos_token=list(ends))
    return Grammar(LLMatcher(tokens, LLMatcher.grammar_from_regex(expression), log_level=0), VOCAB_SIZE, ends)
