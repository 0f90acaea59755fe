"""One pass over a window: the mean loss of its last half, whose tokens have many before them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from service.evaluation.documents import Document, token_digest
from service.evaluation.scoring.token_scores import token_nll
from service.evaluation.unit import Outcome, ScoredUnit


def scored_of(length: int) -> int:
    """Tokens of the last half of a window of ``length`` tokens."""
    return (length + 1) // 2


@dataclass(frozen=True, eq=False)
class LateUnit(ScoredUnit):
    """A window of ``length`` tokens that ends before token ``stop`` of the document.

    The outcome: float64 ``nll`` [1], the mean of the last half in nats.
    """

    kind: ClassVar[str] = "late"
    document: Document
    stop: int

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def token_ids(self) -> list[int]:
        return [*self.prefix, *self.document.token_ids[self.stop - self.length + len(self.prefix) : self.stop]]

    def inputs(self) -> dict[str, Any]:
        return {
            "tokens": token_digest(self.token_ids),
            "scored": scored_of(self.length),
            "chunk": self.chunk_of_device,
        }

    def run(self) -> Generator[int, None, Outcome]:
        with self.slot() as slot:
            nll = yield from token_nll(self.subject.patch, self.token_ids, slot, self.chunk)
        return {"nll": nll[-scored_of(self.length) :].mean(keepdims=True)}

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"nll_mean": float(outcome["nll"][0])}
