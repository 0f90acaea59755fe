"""Counts of the tokens in an answer, as arrays: a step needs those of every penalised request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Occurrences:
    """Distinct tokens of a prompt and of the answer behind it. Those of the prompt alone occur 0 times."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._tokens = np.unique(np.array(prompt_ids, np.int64))
        self._counts = np.zeros(len(self._tokens), np.int64)
        self._places = {token: place for place, token in enumerate(self._tokens.tolist())}
        self._read, self._greatest = 0, max(prompt_ids, default=-1)

    def read(self, answer: Sequence[int]) -> None:
        """Count the tokens that ``answer`` has since the last time."""
        for token in answer[self._read :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._tokens):  # twice the room, so that each token moves a few times at most
                self._tokens, self._counts = (np.pad(each, (0, place + 8)) for each in (self._tokens, self._counts))
            self._tokens[place] = token
            self._counts[place] += 1
        self._read = len(answer)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n]."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """int64 [n], in the order of ``tokens``."""
        return self._counts[: len(self._places)]

    def below(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """``tokens`` and ``counts`` of tokens below ``most``. A prompt may have tokens that no logit is for."""
        if self._greatest < most:
            return self.tokens, self.counts
        kept = self.tokens < most
        return self.tokens[kept], self.counts[kept]
