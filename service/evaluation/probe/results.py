"""The result of a probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from service.evaluation.formatting import listed, percent
from service.evaluation.results import Columns, DocumentInfo, EvaluationResult, MethodInResult, Row
from service.evaluation.scores import ENDS, Interval, Score, Scores, interval_columns
from service.evaluation.statistics.nll import PositionBin, PositionBucket
from service.evaluation.words import best_method, beyond_reach, skipped_text

Measure = Literal[
    "attention", "first_keys", "entropy", "copying", "copying_first", "copying_nll", "copying_nll_first", "nll"
]


SegmentOf = Literal["random", "document"]
"""Tokens that occur in the documents, in random order; or a stretch of a document."""


class DistanceBucket(BaseModel):
    """Mean softmax weight of a query on its keys at a distance of start <= q_idx - kv_idx < stop tokens."""

    start: int
    stop: int
    mass: float


class Attention(BaseModel):
    """Attention of the last queries of a pass of ``length`` tokens, averaged over queries and documents.

    Masses sum to 1, or to less in models whose heads can attend to nothing. ``first_keys`` is the mass on the first 4
    keys, which is also in the bucket of their distance. ``entropy`` is in nats.
    """

    length: int
    buckets: list[DistanceBucket]
    first_keys: float
    entropy: float


class HeadAttention(Attention):
    """One head's."""

    layer: int
    head: int


class Copying(BaseModel):
    """Prediction of a repeated segment's tokens, from its second token on.

    ``distance`` is from a token to its copy. ``accuracy`` is the share of tokens to which no other is preferred,
    ``interval`` Wilson's over ``tokens``, as if they were independent; ``nll_mean`` is in nats. ``accuracy_first`` and
    ``nll_first`` are those of the first occurrence, which has nothing to copy.
    """

    distance: int
    accuracy: float
    interval: Interval
    nll_mean: float
    accuracy_first: float
    nll_first: float
    tokens: int


class ProbeMethod(MethodInResult):
    """One method's numbers."""

    attention: list[HeadAttention] = Field(description="By length, layer and head.")
    attention_mean: list[Attention] = Field(description="By length, over all layers and heads.")
    copying: list[Copying]
    nll_by_position: list[PositionBucket] = Field(description="At the longest length.")


class ProbeResult(EvaluationResult):
    """A whole probe."""

    optional: ClassVar[Columns] = {**dict.fromkeys(("layer", "head", "length", "start", "stop"), int), **ENDS}

    evaluation: Literal["probe"] = "probe"
    bos: bool = Field(description="True when every pass starts with the model's BOS token.")
    position_bin: PositionBin = None
    lengths: list[int]
    queries: int = Field(description="Last positions of each length over which attention is averaged.")
    distances: list[int]
    samples: int
    segment: int
    segment_of: SegmentOf
    seed: int
    documents: list[DocumentInfo]
    skipped: list[DocumentInfo] = Field([], description="Documents left out as shorter than the longest length.")
    methods: list[ProbeMethod]

    def rows(self) -> list[Row]:
        """One row per number.

        ``measure`` names it: "attention" is the mass of a bucket, "copying" an accuracy; "..._first" belongs to a
        segment's first occurrence. ``start`` and ``stop`` bound the distance, or the context of "nll". Means over both
        ``layer`` and ``head`` have neither.
        """
        return [row for method in self.methods for row in self._rows(method)]

    def scores(self) -> Scores:
        """Copying accuracy by distance."""
        by_method = [{at.distance: Score(at.accuracy, at.interval) for at in m.copying} for m in self.methods]
        return Scores("copying accuracy", False, by_method, by="distance")

    def sentences(self) -> list[str]:
        """The best method at copying, and the attention beyond the trained length."""
        return [*best_method(self), *self._far_attention(), *self.cautions()]

    def cautions(self) -> list[str]:
        """Encodings that end before the longest pass, and documents left out."""
        longest = max(self.lengths[-1], self.distances[-1] + self.segment + self.bos)
        return [*beyond_reach(self, longest), *skipped_text(self.documents, self.skipped)]

    def _far_attention(self) -> list[str]:
        """The share of attention beyond the trained length, in passes of the longest length."""
        longest, shares = self.lengths[-1], []
        starts = {bucket.start for method in self.methods for at in method.attention_mean for bucket in at.buckets}
        far = min((start for start in starts if start >= self.trained_length), default=longest)
        if longest <= far:
            return []
        for name, method in zip(self.names(), self.methods, strict=True):
            for at in method.attention_mean:
                if at.length == longest:
                    mass = sum(bucket.mass for bucket in at.buckets if bucket.start >= far)
                    shares.append(f"{name} {percent(mass)} (on the first 4 keys {percent(at.first_keys)})")
        beyond = f"the trained {far:,}" if far == self.trained_length else f"{far:,}"
        return [
            f"In passes of {longest:,} tokens, this share of the attention goes to keys at distances of {beyond} "
            f"tokens or more: {listed(shares)}."
        ]

    def _rows(self, method: ProbeMethod) -> Iterator[Row]:
        for attention in (*method.attention, *method.attention_mean):
            layer, head = (attention.layer, attention.head) if isinstance(attention, HeadAttention) else (None, None)
            where = {"layer": layer, "head": head, "length": attention.length}
            for bucket in attention.buckets:
                yield self._row(method, "attention", bucket.mass, **where, start=bucket.start, stop=bucket.stop)
            yield self._row(method, "first_keys", attention.first_keys, **where)
            yield self._row(method, "entropy", attention.entropy, **where)
        for at in method.copying:
            where = {"start": at.distance, "stop": at.distance + 1}
            yield self._row(method, "copying", at.accuracy, **where, **interval_columns(at.interval, ENDS))
            yield self._row(method, "copying_first", at.accuracy_first, **where)
            yield self._row(method, "copying_nll", at.nll_mean, **where)
            yield self._row(method, "copying_nll_first", at.nll_first, **where)
        for context in method.nll_by_position:
            where = {"length": self.lengths[-1], "start": context.start, "stop": context.stop}
            yield self._row(method, "nll", context.nll_mean, **where)

    def _row(self, method: ProbeMethod, measure: Measure, value: float, **others: str | float | None) -> Row:
        columns = ("measure", "layer", "head", "start", "stop", "value", *ENDS)
        return {
            "method": method.label,
            "model": method.model,
            "length": None,
            **dict.fromkeys(columns),
            "measure": measure,
            **others,
            "value": value,
            "trained_length": self.trained_length,
        }
