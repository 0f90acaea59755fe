"""One pass that shows both perplexity and recall: a stretch of a document, then parts of the stretch again.

Perplexity alone prefers encodings that forget. Small models too can copy a repeated segment (Olsson et al.,
arXiv:2209.11895). This shows how far back an encoding finds tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from service.evaluation.documents import Document
from service.evaluation.scoring.chunks import most_tokens
from service.evaluation.scoring.token_scores import token_scores
from service.evaluation.unit import Outcome, Unit, token_digest

COPIES = 4
"""Repeated segments: from the start of the stretch, and from a quarter, a half and three quarters of it."""

SHORTEST = 64
"""Tokens of the shortest window."""

MOST_SEGMENT = 64


class Layout(NamedTuple):
    """``tail`` last tokens of the stretch are scored for perplexity, segments of ``segment`` tokens are repeated."""

    tail: int
    segment: int

    @classmethod
    def within(cls, length: int) -> Layout:
        """The layout that fits windows of ``length`` tokens, and so all longer ones."""
        return cls(length // 4, min(length // 16, MOST_SEGMENT))

    @property
    def repeated(self) -> int:
        """Tokens after the stretch."""
        return COPIES * self.segment


@dataclass(frozen=True, eq=False)
class RecallUnit(Unit):
    """A window of ``length`` tokens whose stretch ends before token ``stop`` of the document.

    The outcome: float64 ``nll`` in nats [tail], and int64 ``ranks`` [copies, segment - 1] of the repeated tokens from
    the second on. A rank is 1 where no other token is preferred. ``ranks_first`` are the ranks of the tokens' first
    occurrence.
    """

    kind: ClassVar[str] = "recall"
    document: Document
    stop: int
    layout: Layout
    bos: int | None
    chunk: int | None

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def _special(self) -> int:
        return 0 if self.bos is None else 1

    @property
    def stretch(self) -> int:
        """Tokens of the document before the repeated segments."""
        return self.length - self._special - self.layout.repeated

    @property
    def starts(self) -> list[int]:
        """First tokens of the repeated segments inside the stretch."""
        return [copy * (self.stretch - self.layout.segment) // COPIES for copy in range(COPIES)]

    @property
    def token_ids(self) -> list[int]:
        stretch = self.document.token_ids[self.stop - self.stretch : self.stop]
        repeated = [token for start in self.starts for token in stretch[start : start + self.layout.segment]]
        return [*([] if self.bos is None else [self.bos]), *stretch, *repeated]

    def inputs(self) -> dict[str, Any]:
        layout = list(self.layout)
        return {
            "tokens": token_digest(self.token_ids),
            "layout": layout,
            "bos": self.bos,
            "chunk": most_tokens(self.chunk, self.subject.patch.model.device),
        }

    def run(self) -> Generator[int, None, Outcome]:
        with self.slot() as slot:
            scores = yield from token_scores(self.subject.patch, self.token_ids, slot, self.chunk, top=0)
        end = self._special + self.stretch
        segment = self.layout.segment
        again = [end + copy * segment for copy in range(COPIES)]
        first = [self._special + start for start in self.starts]
        return {
            # Scores begin with that of token 1.
            "nll": -scores.logprobs[end - self.layout.tail - 1 : end - 1],
            "ranks": np.stack([scores.ranks[start : start + segment - 1] for start in again]),
            "ranks_first": np.stack([scores.ranks[start : start + segment - 1] for start in first]),
        }

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"nll_mean": float(outcome["nll"].mean()), "recall": float((outcome["ranks"] == 1).mean())}
