"""Two passes of a probe: one with its attention recorded, one over a repeated segment."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from patches import AttentionMass
from service.evaluation.documents import Document, token_digest
from service.evaluation.scoring.chunks import bounded, chunk_length
from service.evaluation.scoring.token_scores import Reading, token_scores
from service.evaluation.unit import Outcome, ScoredUnit


@dataclass(frozen=True, eq=False)
class AttentionUnit(ScoredUnit):
    """Attention of the last ``queries`` of a document's first ``length`` tokens, the BOS counted in.

    The outcome: ``layers`` and ``edges`` int64, ``mass`` float64 [layers, heads, buckets], ``first_keys`` and
    ``entropy`` float64 [layers, heads]; see ``patches.AttentionMass``.
    """

    kind: ClassVar[str] = "attention"
    document: Document
    queries: int

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def token_ids(self) -> list[int]:
        return [*self.prefix, *self.document.token_ids[: self.length - len(self.prefix)]]

    def inputs(self) -> dict[str, Any]:
        return {
            "tokens": token_digest(self.token_ids),
            "queries": self.queries,
            "chunk": self.chunk_of_device,
        }

    def run(self) -> Generator[int, None, Outcome]:
        mass = AttentionMass(self.length - self.queries, self.length)
        with self.slot() as slot:
            yield from self._prefill(mass, slot)
        mass = self.subject.patch.ranks.complete(mass)
        return {
            "layers": np.array(mass.layers),
            "edges": np.array(mass.edges),
            "mass": mass.mass(),
            "first_keys": mass.first_keys(),
            "entropy": mass.entropy(),
        }

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"first_keys": float(outcome["first_keys"].mean()), "entropy": float(outcome["entropy"].mean())}

    def _prefill(self, mass: AttentionMass, slot: int) -> Generator[int, None, None]:
        """Chunks as in scoring, but every key stays in the cache. Wherever it yields, others' forwards may run: only
        its own are observed."""
        patch = self.subject.patch
        reading, chunk = Reading(patch, slot, self.length), chunk_length(self.chunk, patch)
        ids = torch.tensor(self.token_ids, device=patch.model.device)
        while (start := reading.length) < self.length:
            most = bounded(patch, chunk, start) if patch.returns_cache else self.length
            with patch.observing(mass.observe):
                reading.logits(ids[start : start + most], evict=False)
            yield reading.length - start


class RepeatedSegment(NamedTuple):
    """A segment, then ``distance - segment`` tokens from a place in ``document``, then the segment again.

    Its tokens are drawn from ``vocabulary`` int64 [n], none twice; where that is None, they follow each other in the
    document. Equal seeds draw equal segments at every distance.
    """

    document: Document
    vocabulary: np.ndarray | None
    distance: int
    segment: int
    seed: tuple[int, ...]

    def token_ids(self) -> list[int]:
        rng = np.random.default_rng(self.seed)
        if self.vocabulary is None:
            repeated = self._stretch(rng, self.segment)
        else:
            repeated = rng.choice(self.vocabulary, self.segment, replace=False).tolist()
        return [*repeated, *self._stretch(rng, self.distance - self.segment), *repeated]

    def _stretch(self, rng: np.random.Generator, tokens: int) -> list[int]:
        start = int(rng.integers(0, len(self.document.token_ids) - tokens + 1))
        return self.document.token_ids[start : start + tokens]


@dataclass(frozen=True, eq=False)
class CopyUnit(ScoredUnit):
    """Prediction of a repeated segment's tokens, from the second on.

    The outcome: float64 ``nll`` in nats and int64 ``ranks`` [segment - 1] of the second occurrence, 1 where no other
    token is preferred; ``nll_first`` and ``ranks_first`` of the first one.
    """

    kind: ClassVar[str] = "copy"
    repeated: RepeatedSegment

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def token_ids(self) -> list[int]:
        return [*self.prefix, *self.repeated.token_ids()]

    def inputs(self) -> dict[str, Any]:
        return {
            "tokens": token_digest(self.token_ids),
            "segment": self.repeated.segment,
            "bos": self.bos,
            "chunk": self.chunk_of_device,
        }

    def run(self) -> Generator[int, None, Outcome]:
        token_ids, scored = self.token_ids, self.repeated.segment - 1
        with self.slot() as slot:
            scores = yield from token_scores(self.subject.patch, token_ids, slot, self.chunk, top=0)
        begin = len(self.prefix)  # the first score is that of token 1
        first, second = slice(begin, begin + scored), slice(len(token_ids) - 1 - scored, None)
        return {
            "nll": -scores.logprobs[second],
            "ranks": scores.ranks[second],
            "nll_first": -scores.logprobs[first],
            "ranks_first": scores.ranks[first],
        }

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"accuracy": float((outcome["ranks"] == 1).mean()), "nll_mean": float(outcome["nll"].mean())}
