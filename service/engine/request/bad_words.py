"""Sequences of tokens that an answer may not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class BadWords:
    """The last token of a sequence may not follow those before it. As in vLLM, these are the answer's own."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for *before, last in sequences:
            self._lasts.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._lasts})

    def behind(self, answer: Sequence[int]) -> np.ndarray:
        """Tokens int64 [n] that may not come behind ``answer``."""
        ends = [tuple(answer[len(answer) - length :]) for length in self._lengths if length <= len(answer)]
        return np.array([last for end in ends for last in self._lasts.get(end, ())], np.int64)
