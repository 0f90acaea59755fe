"""Grammars over tokens that are the characters of ASCII, for models of ``VOCAB_SIZE`` tokens, or that are bytes."""

from __future__ import annotations

from typing import ClassVar

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from service.engine.request import Grammar
from service.models.text.grammar_text import LIMITS
from tests.models import VOCAB_SIZE

END = 0
"""The token that ends an answer."""


class _Bytes:
    eos_token_id: ClassVar = 256
    bos_token_id: ClassVar = None
    tokens: ClassVar = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    special_token_ids: ClassVar = [256]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def follows(grammar: str, text: str) -> bool:
    """True if ``text`` is a whole answer by ``grammar``."""
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    length = len(text.encode())
    return matcher.try_consume_tokens(list(text.encode())) == length and matcher.is_accepting()


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
