"""One pass that shows both perplexity and recall: text of a document, with repeated parts before its end.

Perplexity alone prefers encodings that forget. Small models too can copy a repeated segment (Olsson et al.,
arXiv:2209.11895). This shows how far back an encoding finds tokens.

Perplexity is that of the last tokens of the window, where an encoding fails that does not reach the length.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from service.evaluation.documents import Document, token_digest
from service.evaluation.scoring.token_scores import token_scores
from service.evaluation.unit import Outcome, ScoredUnit

COPIES = 4
"""Repeated segments: from the start of the text before, and from each further quarter of it."""

SHORTEST = 64
"""Tokens of the shortest window."""

MOST_SEGMENT = 64

TAILS = 4
"""Tails in the reference length, which is the trained one or the target, if that is less."""


class Layout(NamedTuple):
    """``tail`` last tokens are scored for perplexity, segments of ``segment`` tokens are repeated before them."""

    tail: int
    segment: int

    @classmethod
    def within(cls, length: int) -> Layout:
        """The layout that fits windows of ``length`` tokens, and so all longer ones."""
        return cls(length // TAILS, min(length // 16, MOST_SEGMENT))

    @property
    def repeated(self) -> int:
        """Tokens that repeat others, all segments together."""
        return COPIES * self.segment


@dataclass(frozen=True, eq=False)
class RecallUnit(ScoredUnit):
    """A window of ``length`` tokens that ends before token ``stop`` of the document.

    The outcome: float64 ``nll`` in nats [tail], and int64 ``ranks`` [copies, segment - 1] of the repeated tokens from
    the second on. A rank is 1 where no other token is preferred. ``ranks_first`` are the ranks of the tokens' first
    occurrence. ``nll_late`` [1] is the mean of all unrepeated tokens in the last half of the window, past the trained
    length. Many tokens choose more surely.
    """

    kind: ClassVar[str] = "recall"
    document: Document
    stop: int
    layout: Layout

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def stretch(self) -> int:
        """Tokens of the document: all but the repeated segments."""
        return self.length - len(self.prefix) - self.layout.repeated

    @property
    def before(self) -> int:
        """Tokens of the stretch before the repeated segments; its tail follows them."""
        return self.stretch - self.layout.tail

    @property
    def starts(self) -> list[int]:
        """First tokens of the repeated segments inside the stretch."""
        return [copy * (self.before - self.layout.segment) // COPIES for copy in range(COPIES)]

    @property
    def late(self) -> int:
        """Tokens before the repeated segments that are late in the window."""
        trained = TAILS * self.layout.tail
        return max(0, len(self.prefix) + self.before - max(self.length // 2, trained))

    @property
    def token_ids(self) -> list[int]:
        stretch = self.document.token_ids[self.stop - self.stretch : self.stop]
        repeated = [token for start in self.starts for token in stretch[start : start + self.layout.segment]]
        return [*self.prefix, *stretch[: self.before], *repeated, *stretch[self.before :]]

    def inputs(self) -> dict[str, Any]:
        return {
            "tokens": token_digest(self.token_ids),
            "layout": [*self.layout, self.late],
            "bos": self.bos,
            "chunk": self.chunk_of_device,
        }

    def run(self) -> Generator[int, None, Outcome]:
        with self.slot() as slot:
            scores = yield from token_scores(self.subject.patch, self.token_ids, slot, self.chunk, top=0)
        segment, before = self.layout.segment, len(self.prefix) + self.before
        late = scores.logprobs[before - 1 - self.late : before - 1]
        again = [len(self.prefix) + self.before + copy * segment for copy in range(COPIES)]
        first = [len(self.prefix) + start for start in self.starts]
        return {
            "nll": -scores.logprobs[-self.layout.tail :],
            "nll_late": -np.concatenate([late, scores.logprobs[-self.layout.tail :]]).mean(keepdims=True),
            # Scores begin with that of token 1, and so these with the second token of each segment.
            "ranks": np.stack([scores.ranks[start : start + segment - 1] for start in again]),
            "ranks_first": np.stack([scores.ranks[start : start + segment - 1] for start in first]),
        }

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"nll_mean": float(outcome["nll"].mean()), "recall": float((outcome["ranks"] == 1).mean())}
