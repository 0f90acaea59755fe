"""Which tokens are scored with which context: five protocols as lists of windows.

``curve``: one window from the document's start; the score at length L is that of the first L tokens.
``sliding``: windows of L every S tokens, each scoring the tokens no earlier window has seen; this is
jquesnelle/yarn's eval/perplexity.py. ``disjoint``: consecutive whole windows of L, all tokens scored.
``tail``: only the last S tokens of each window, the same tokens at every length (Su, ReRoPE).
``rolling``: ``loglikelihood_rolling`` of lm-evaluation-harness, every token predicted once.
A BOS token, where windows start with one, counts towards L.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """Tokens start <= i < stop of a document in one pass, scored from ``first_scored`` on."""

    start: int
    stop: int
    first_scored: int


def curve(tokens: int, length: int) -> list[Window]:
    """One window over the first ``length`` of ``tokens``."""
    return [Window(0, min(length, tokens), 0)]


def sliding(tokens: int, length: int, stride: int) -> list[Window]:
    """Windows begin at 0, stride, 2 stride, ... until one reaches the document's end."""
    windows, scored = [], 0
    for start in range(0, tokens, stride):
        stop = min(start + length, tokens)
        windows.append(Window(start, stop, scored))
        scored = stop
        if stop == tokens:
            break
    return windows


def disjoint(tokens: int, length: int) -> list[Window]:
    """Whole windows only: a shorter last one would score tokens with less context than asked for."""
    return [Window(start, start + length, start) for start in range(0, tokens - length + 1, length)]


def tail(tokens: int, length: int, scored: int, longest: int, stride: int) -> list[Window]:
    """Windows that end at longest, longest + stride, ...; ``scored`` last tokens of each count."""
    return [Window(stop - length, stop, stop - scored) for stop in range(longest, tokens + 1, stride)]


def rolling(tokens: int, length: int) -> list[Window]:
    """Windows that read ``length`` tokens, the harness' ``max_length``, and so predict up to one more.

    ``tokens`` counts the prefix token, which only the first window has: a later one starts with the last token of the
    window before, and the last one reaches back as far as a whole window does.
    """
    windows, scored = [], 1
    while scored < tokens:
        stop = min(scored + length, tokens)
        windows.append(Window(max(0, stop - length - 1), stop, scored))
        scored = stop
    return windows
