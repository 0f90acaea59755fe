"""Five protocols: the tokens that are scored and their context, as windows that are counted without a list.

``curve``: one window from the document's start; the score at length L is that of the first L tokens.
``sliding``: windows of L every S tokens, each scoring the tokens no earlier window has seen. This is
jquesnelle/yarn's eval/perplexity.py. ``disjoint``: consecutive whole windows of L, all tokens scored.
``tail``: only the last S tokens of each window, the same tokens at every length (Su, ReRoPE).
``rolling``: ``loglikelihood_rolling`` of lm-evaluation-harness, every token predicted once.
A BOS token, where windows start with one, counts towards L.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ScoredWindow(NamedTuple):
    """Tokens start <= i < stop of a document in one pass, scored from ``first_scored`` on."""

    start: int
    stop: int
    first_scored: int


@dataclass(frozen=True)
class Windows:
    """``count`` windows of a document of ``length`` tokens. Window k ends ``stride`` tokens after the one before, at
    the document's end at the latest, and has at most ``size`` tokens.

    ``scored`` is how many of its last tokens a window scores; None: those that no earlier window has.
    """

    count: int
    length: int
    size: int
    first_stop: int
    stride: int
    scored: int | None = None
    begins: int = 0
    """The first token that the first window scores."""
    aligned: bool = True
    """A window that the document's end cuts keeps its start; if False, it keeps its size and reaches back."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> ScoredWindow:
        index += self.count if index < 0 else 0
        if not 0 <= index < self.count:
            raise IndexError(index)
        full = self.first_stop + index * self.stride
        stop = min(full, self.length)
        start = max(0, (full if self.aligned else stop) - self.size)
        if self.scored is not None:
            return ScoredWindow(start, stop, stop - self.scored)
        return ScoredWindow(start, stop, self.begins if index == 0 else full - self.stride)

    def __iter__(self) -> Iterator[ScoredWindow]:
        return (self[index] for index in range(self.count))

    @property
    def tokens(self) -> int:
        """Tokens that all windows read. Only the first and the last can be shorter than ``size``."""
        ends = {0, self.count - 1} if self.count else set()
        return sum(self[index].stop - self[index].start for index in ends) + (self.count - len(ends)) * self.size


def curve(tokens: int, length: int) -> Windows:
    """One window over the first ``length`` of ``tokens``."""
    return Windows(1, tokens, length, length, length)


def sliding(tokens: int, length: int, stride: int) -> Windows:
    """Windows begin at 0, stride, 2 stride, ... until one reaches the document's end."""
    return Windows(1 + max(0, -(-(tokens - length) // stride)), tokens, length, length, stride)


def disjoint(tokens: int, length: int) -> Windows:
    """Whole windows only: a shorter last one would score tokens with less context than asked for."""
    return Windows(tokens // length, tokens, length, length, length)


def tail(tokens: int, length: int, scored: int, longest: int, stride: int, most: int | None = None) -> Windows:
    """At most ``most`` windows that end at longest, longest + stride, ...; ``scored`` last tokens of each count."""
    count = max(0, (tokens - longest) // stride + 1)
    return Windows(count if most is None else min(count, most), tokens, length, longest, stride, scored)


def rolling(tokens: int, length: int) -> Windows:
    """Windows that read ``length`` tokens, the harness' ``max_length``, and so predict up to one more.

    ``tokens`` counts the prefix token, which only the first window has. Later windows start with the last token of the
    window before. The last one reaches back to the size of a whole window.
    """
    count = max(0, -(-(tokens - 1) // length))
    return Windows(count, tokens, length + 1, length + 1, length, begins=1, aligned=False)
