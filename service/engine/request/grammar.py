"""The grammar of an answer: which tokens may come next. The library llguidance parses and masks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD = 32
"""Tokens in a word of a mask."""

FREE_S, TOKEN_S = 0.25, 0.003
"""Seconds for the masks of an answer, and more for each of its tokens. The generation thread computes them.

A mask of 131,072 tokens takes 0.01 to 1 ms.
"""


class GrammarFailed(RuntimeError):
    """An answer cannot go on by its grammar; the message says why."""


class Grammar:
    """A compiled grammar at a place in one answer: ``matcher`` has taken the tokens before it.

    ``tokens`` counts those of the matcher. ``ends`` are the model's end-of-text tokens, which may be text to it too.
    """

    def __init__(self, matcher: LLMatcher, tokens: int, ends: Sequence[int]) -> None:
        self._matcher, self._tokens, self._ends = matcher, tokens, list(ends)
        self._taken, self._used_s = 0, 0.0

    def read(self, answer: Sequence[int]) -> None:
        """Take the tokens that ``answer`` has since the last time. A wrong one makes ``allowed`` fail."""
        new = list(answer[self._taken :])
        self._taken = len(answer)
        if new:
            self._matcher.consume_tokens(new)

    def allowed(self, vocabulary: int) -> np.ndarray:
        """Tokens bool [vocabulary] that may come next.

        Raises:
            GrammarFailed: when there are none, or the masks of this answer take too much work or time.
        """
        words = np.zeros(-(-self._tokens // WORD), np.int32)
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._used_s += time.thread_time() - began
        if self._matcher.is_error():
            raise GrammarFailed(self._matcher.get_error().partition("\n")[0])
        if self._used_s > FREE_S + TOKEN_S * self._taken:
            raise GrammarFailed(f"it has taken {self._used_s:.2f} s for {self._taken} tokens")
        allowed = np.unpackbits(words.view(np.uint8), count=self._tokens, bitorder="little").view(np.bool_)
        if not self._matcher.is_accepting():
            allowed[self._ends] = False
        if not allowed[:vocabulary].any():
            raise GrammarFailed("no token of the model continues the answer")
        return allowed[:vocabulary]
