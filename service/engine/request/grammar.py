"""The grammar of an answer: which tokens may come next. The library llguidance parses and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD = 32
"""Tokens in a word of a mask."""


class GrammarFailed(RuntimeError):
    """An answer cannot go on by its grammar; the message says why."""


class Grammar:
    """A compiled grammar at a place in an answer: ``matcher`` has taken the tokens before it.

    ``ends`` are the model's end-of-text tokens, which may be text to the grammar too.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        self._matcher, self._ends, self._taken = matcher, list(ends), 0

    def begun(self) -> Grammar:
        """The same grammar for another answer."""
        return Grammar(self._matcher.deep_copy(), self._ends)

    def read(self, answer: Sequence[int]) -> None:
        """Take the tokens that ``answer`` has since the last time. A wrong one makes ``allowed`` fail."""
        new = list(answer[self._taken :])
        self._taken = len(answer)
        if new:
            self._matcher.consume_tokens(new)

    def allowed(self, vocabulary: int) -> np.ndarray:
        """Tokens bool [vocabulary] that may come next.

        Raises:
            GrammarFailed: when there are none, or the grammar needs more work for a token than the library's limits.
        """
        words = np.zeros(-(-vocabulary // WORD), np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error().partition("\n")[0])
        allowed = np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)
        if not self._matcher.is_accepting():
            allowed[self._ends] = False
        if not allowed.any():
            raise GrammarFailed("no token of the model continues the answer")
        return allowed
