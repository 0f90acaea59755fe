"""Grammars compiled for the tokens of a model, by llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from service.engine.request import Grammar, GrammarFailed
from service.models.text.grammar_parts import Delimiter
from service.models.text.grammar_text import LIMITS, GrammarRefused

KEPT = 256
"""Grammars that are known to compile."""


class Grammars:
    """Compiles grammars for one model. ``eos_token_ids`` end an answer that is complete. Safe for threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, max(vocab_size, len(tokenizer))
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._lock, self._tried = threading.Lock(), dict[str, None]()

    def is_tried(self, grammar: str) -> bool:
        """True if ``grammar`` has passed a trial lately."""
        return grammar in self._tried

    def passed(self, grammar: str) -> None:
        """Note that ``grammar`` has passed a trial. On the event loop."""
        self._tried[grammar] = None
        if len(self._tried) > KEPT:
            del self._tried[next(iter(self._tried))]

    def compiled(self, grammar: str) -> Grammar:
        """``grammar``, which has passed a trial, at the start of one answer.

        Nothing is remembered or shared: a compiled grammar has room for one answer.

        Raises:
            GrammarRefused: for a wrong or too large one, and for a model that cannot follow any.
        """
        with self._lock:
            known = self._known
        matcher = LLMatcher(known, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarRefused(matcher.get_error())
        compiled = Grammar(matcher, self._tokens, self._eos_token_ids)
        try:  # after a first mask that is too dear, the second one fails
            for each in (Grammar(matcher.deep_copy(), self._tokens, self._eos_token_ids), compiled):
                each.allowed(self._tokens)
        except GrammarFailed as error:
            raise GrammarRefused(str(error)) from error
        return compiled

    def delimiter(self, text: str) -> Delimiter:
        """``text``, and its token where that is no text to the library: special ones, and such as ``<think>``.

        Raises:
            GrammarRefused: for a model that cannot follow any grammar.
        """
        with self._lock:
            known = self._known
        token = self._tokenizer.backend_tokenizer.token_to_id(text)
        if token is None or not known.is_special_token(token):
            return Delimiter(text)
        return Delimiter(text, token, tuple(other for other in self._named if other != token))

    @cached_property
    def _named(self) -> list[int]:
        """Tokens that people may write about, and that are no text to the library all the same."""
        added = self._tokenizer.added_tokens_decoder.items()
        return [number for number, token in added if not token.special and self._known.is_special_token(number)]

    @cached_property
    def _known(self) -> LLTokenizer:
        """The tokenizer as the library sees it; about a second of work for 128,000 tokens."""
        if not self._eos_token_ids:
            raise GrammarRefused("the model has no end-of-text token, which ends an answer by a grammar")
        try:
            return from_tokenizer(self._tokenizer, self._tokens, self._eos_token_ids)
        except ValueError as error:
            raise GrammarRefused(f"the model's tokenizer cannot follow a grammar: {error}") from error
