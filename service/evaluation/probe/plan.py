"""Attention, copying and loss by distance: the passes, and the arithmetic on their outcomes.

Induction heads copy a repeated segment (Olsson et al., arXiv:2209.11895, "random repeated tokens"). Copying needs no
knowledge of the text, so small models show how far back an encoding still finds tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from service.evaluation.checks import (
    InvalidEvaluation,
    affordable,
    at_most,
    bos_of,
    documents_by_length,
    lengths_of,
    position_bin_of,
    subjects_of,
)
from service.evaluation.cost import Cost
from service.evaluation.documents import Document
from service.evaluation.perplexity import protocols
from service.evaluation.perplexity.plan import WindowsUnit
from service.evaluation.probe.averages import copying, heads_attention, mean_attention
from service.evaluation.probe.request import ProbeRequest
from service.evaluation.probe.results import ProbeMethod, ProbeResult
from service.evaluation.probe.units import AttentionUnit, CopyUnit, RepeatedSegment
from service.evaluation.results import DocumentInfo
from service.evaluation.statistics.per_token import position_buckets
from service.evaluation.unit import Outcome, Plan, Subject, Unit
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

DEFAULT_QUERIES = 64
DEFAULT_REACH = 4
"""Attention is looked at up to this many times the trained length by default."""

SHORTEST_DISTANCE = 16


class _Parts(NamedTuple):
    """One method's units: by length and document, by distance and sample, by document."""

    attention: list[list[AttentionUnit]]
    copying: list[list[CopyUnit]]
    loss: list[WindowsUnit]

    @property
    def units(self) -> list[Unit]:
        return [
            *(u for units in self.attention for u in units),
            *(u for units in self.copying for u in units),
            *self.loss,
        ]


@dataclass(frozen=True, eq=False)
class ProbePlan(Plan):
    """``vocabulary`` int64 [n] is what segments are drawn of; None: of the documents as they are. ``bos`` is the token
    every pass starts with. ``chunk`` is the most tokens between two generation steps, ``longest`` the tokens of the
    longest pass. ``position_bin`` is the tokens of a bin of the loss by position; None: bins double."""

    model: str
    trained_length: int
    subjects: list[Subject]
    documents: list[Document]
    skipped: list[DocumentInfo]
    lengths: list[int]
    queries: int
    distances: list[int]
    samples: int
    segment: int
    seed: int
    vocabulary: np.ndarray | None
    bos: int | None
    chunk: int | None
    longest: int
    position_bin: int | None

    @cached_property
    def units(self) -> Sequence[Unit]:
        return [unit for parts in self._parts for unit in parts.units]

    @cached_property
    def _parts(self) -> list[_Parts]:
        return [self._parts_of(subject) for subject in self.subjects]

    @property
    def cost(self) -> Cost:
        documents, copies = len(self.documents), len(self.distances) * self.samples
        attention = sum(self.lengths) * documents
        copying = sum(map(self._copy_length, self.distances)) * self.samples
        loss = (self.lengths[-1] - self._special) * documents
        passes = len(self.lengths) * documents + copies + documents
        return Cost(attention + copying + loss, passes, passes).times(len(self.subjects))

    @property
    def _special(self) -> int:
        return 0 if self.bos is None else 1

    def _copy_length(self, distance: int) -> int:
        return self._special + distance + self.segment

    def _parts_of(self, subject: Subject) -> _Parts:
        return _Parts(
            [[self._attention(subject, document, n) for document in self.documents] for n in self.lengths],
            [[self._copy(subject, distance, s) for s in range(self.samples)] for distance in self.distances],
            [self._loss(subject, document) for document in self.documents],
        )

    def _attention(self, subject: Subject, document: Document, length: int) -> AttentionUnit:
        return AttentionUnit(
            subject=subject,
            length=length,
            name=document.name,
            document=document,
            queries=self.queries,
            bos=self.bos,
            chunk=self.chunk,
        )

    def _copy(self, subject: Subject, distance: int, sample: int) -> CopyUnit:
        document = self.documents[sample % len(self.documents)]
        return CopyUnit(
            subject=subject,
            length=self._copy_length(distance),
            name=f"sample {sample} at {distance}",
            repeated=RepeatedSegment(document, self.vocabulary, distance, self.segment, (self.seed, sample)),
            bos=self.bos,
            chunk=self.chunk,
        )

    def _loss(self, subject: Subject, document: Document) -> WindowsUnit:
        return WindowsUnit(
            subject=subject,
            length=self.lengths[-1],
            name=document.name,
            document=document,
            windows=protocols.curve(len(document.token_ids), self.lengths[-1] - self._special),
            bos=self.bos,
            chunk=self.chunk,
        )

    def result(self, outcomes: Sequence[Outcome]) -> ProbeResult:
        found = dict(zip(self.units, outcomes, strict=True))
        return ProbeResult(
            model=self.model,
            trained_length=self.trained_length,
            bos=self.bos is not None,
            position_bin=self.position_bin,
            lengths=self.lengths,
            queries=self.queries,
            distances=self.distances,
            samples=self.samples,
            segment=self.segment,
            segment_of="document" if self.vocabulary is None else "random",
            seed=self.seed,
            documents=[document.info for document in self.documents],
            skipped=self.skipped,
            methods=[self._method(*part, found) for part in zip(self.subjects, self._parts, strict=True)],
        )

    def _method(self, subject: Subject, parts: _Parts, found: dict[Unit, Outcome]) -> ProbeMethod:
        by_length = [(units[0].length, [found[unit] for unit in units]) for units in parts.attention]
        scored = [s for i, unit in enumerate(parts.loss) for s in unit.scored(found[unit], i, self.lengths[-1])]
        return ProbeMethod(
            **subject.described(self.longest),
            attention=[head for length, outcomes in by_length for head in heads_attention(length, outcomes)],
            attention_mean=[mean_attention(length, outcomes) for length, outcomes in by_length],
            copying=[
                copying(distance, [found[unit] for unit in units])
                for distance, units in zip(self.distances, parts.copying, strict=True)
            ],
            nll_by_position=position_buckets(scored, self.position_bin),
        )


def plan_of(request: ProbeRequest, models: ModelRegistry, settings: Settings) -> ProbePlan:
    """Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    if served.patch.geometry.compresses_keys:
        raise InvalidEvaluation("model", "some keys of this model cover several tokens, so attention has no distances")
    bos = bos_of(request.bos, served)
    special = 0 if bos is None else 1
    documents, skipped = documents_by_length(request, served, special, settings)
    lengths = lengths_of(request.length_values(), served, documents, special, settings)
    if request.lengths is None:
        lengths = sorted({lengths[0], min(lengths[-1], DEFAULT_REACH * served.trained_length)})
    queries = request.queries or min(DEFAULT_QUERIES, lengths[0])
    if queries > lengths[0]:
        raise InvalidEvaluation("queries", f"must be at most the shortest length ({lengths[0]})")
    shortest = min(len(document.token_ids) for document in documents)
    if request.segment_of == "document" and request.segment > shortest:
        raise InvalidEvaluation("segment", f"must be at most the shortest document's {shortest} tokens")
    around = special + request.segment
    room = min(served.engine.scores.most - around, shortest + request.segment)
    distances = _distances(request, room, lengths[-1] - around)
    at_most("distances", len(distances), settings.max_lengths)
    longest = max(lengths[-1], around + distances[-1])
    plan = ProbePlan(
        model=served.name,
        trained_length=served.trained_length,
        subjects=subjects_of(request.methods, served, models, settings, longest=longest),
        documents=documents,
        skipped=skipped,
        lengths=lengths,
        queries=queries,
        distances=distances,
        samples=request.samples,
        segment=request.segment,
        seed=request.seed,
        vocabulary=_vocabulary(documents, served, request.segment) if request.segment_of == "random" else None,
        bos=bos,
        chunk=settings.score_chunk,
        longest=longest,
        position_bin=position_bin_of(request, lengths[-1]),
    )
    affordable(plan, settings)
    return plan


def _distances(request: ProbeRequest, room: int, default_room: int) -> list[int]:
    """Ascending distances; ``room`` is the most that documents and server allow, ``default_room`` that of the
    longest length."""
    if request.distances is None:
        doubling = (SHORTEST_DISTANCE << step for step in range(24))
        found = [d for d in doubling if request.segment <= d <= min(room, default_room)]
        if not found:
            raise InvalidEvaluation("segment", f"{request.segment} tokens, twice, do not fit into the longest length")
        return found
    distances = sorted(set(request.distances))
    if distances[0] < request.segment:
        raise InvalidEvaluation("distances", f"{distances[0]} is below the segment's {request.segment} tokens")
    if distances[-1] > room:
        raise InvalidEvaluation("distances", f"{distances[-1]} is beyond the document or the server: at most {room}")
    return distances


def _vocabulary(documents: Sequence[Document], served: ServedModel, segment: int) -> np.ndarray:
    """int64 [n]: ids that occur in the documents, without special tokens."""
    special = set(served.tokenizer.all_special_ids)
    occurring = {token for document in documents for token in document.token_ids}
    vocabulary = np.array(sorted(occurring - special), np.int64)
    if len(vocabulary) < segment:
        raise InvalidEvaluation("segment", f"must be at most the {len(vocabulary)} different tokens of the input")
    return vocabulary
