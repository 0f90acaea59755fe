"""Key tokens, which need a long context: arXiv:2410.23771, section 3, and its code, PKU-ML/LongPPL.

An evaluator scores every token with a long and with a short context. A key token gains much from the long context and
is then predicted well. Other tokens are as predictable from a few words, or never. All key tokens weigh the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.perplexity.protocols import Windows, sliding

MOST_SHORT_CONTEXT = 4096
"""Published as ``trunc_len``; a quarter of it, 1024, as ``sliding_window``."""


def is_key(nll_long: np.ndarray, nll_short: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """Bool [n] from NLL [n] in nats: gained more than ``alpha``, and a log-probability above ``beta``."""
    return np.asarray((nll_short - nll_long > alpha) & (nll_long < -beta))


class Contexts(NamedTuple):
    """Tokens of the evaluator's long windows, least tokens of context in its short ones, and the stride of both.

    A token has at least long - stride tokens of context in a long window. In a short one it has at most
    short + stride - 1. A BOS is counted. Near the document's start, a token has all tokens before it. The published
    program has one long window, the whole text.
    """

    long: int
    short: int
    stride: int

    def long_windows(self, tokens: int, special: int) -> Windows:
        return sliding(tokens, self.long - special, self.stride)

    def short_windows(self, tokens: int, special: int) -> Windows:
        return sliding(tokens, self.short + self.stride - special, self.stride)


def contexts_of(long: int, short: int | None, stride: int | None) -> Contexts:
    """With the defaults in place.

    Raises:
        InvalidEvaluation: when some token's short context could reach as far as its long one.
    """
    short = short or min(MOST_SHORT_CONTEXT, max(1, long // 4))
    if short > long - 2:
        raise InvalidEvaluation("short_context", f"must be at most {long - 2}: long_context is {long}")
    most = (long - short) // 2
    stride = stride or max(1, min(short // 4, most))
    if stride > most:
        raise InvalidEvaluation("stride", f"must be at most {most}, half of what lies between the two contexts")
    return Contexts(long, short, stride)
