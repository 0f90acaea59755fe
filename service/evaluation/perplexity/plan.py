"""Perplexity against context length: which passes answer which lengths, and the arithmetic on their NLL."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

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
    too_short,
)
from service.evaluation.cost import Cost
from service.evaluation.documents import Document, token_digest
from service.evaluation.perplexity import protocols
from service.evaluation.perplexity.protocols import ScoredWindow, Windows
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.perplexity.results import MethodResult, PerplexityResult, Protocol
from service.evaluation.request import Bos
from service.evaluation.results import DocumentInfo
from service.evaluation.scoring.token_scores import token_nll
from service.evaluation.statistics.per_token import Scored, length_result, position_buckets
from service.evaluation.unit import Outcome, Plan, ScoredUnit, Subject, Unit
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

DEFAULT_STRIDE = 256
DEFAULT_TAIL = 256


@dataclass(frozen=True, eq=False)
class WindowsUnit(ScoredUnit):
    """NLL of a document's windows: float64 ``nll`` of every token that a window scores, window after window."""

    kind: ClassVar[str] = "windows"
    document: Document
    windows: Windows

    @property
    def tokens(self) -> int:
        return self.windows.tokens

    def inputs(self) -> dict[str, Any]:
        return {
            "tokens": token_digest(self.document.token_ids),
            "windows": asdict(self.windows),
            "bos": self.bos,
            "chunk": self.chunk_of_device,
        }

    def run(self) -> Generator[int, None, Outcome]:
        scored = []
        with self.slot() as slot:
            for window in self.windows:
                token_ids = [*self.prefix, *self.document.token_ids[window.start : window.stop]]
                nll = yield from token_nll(self.subject.patch, token_ids, slot, self.chunk)
                scored.append(nll[self.first(window) - self._first_predicted(window) :])
        return {"nll": np.concatenate(scored)}

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"nll_mean": float(outcome["nll"].mean())} if len(outcome["nll"]) else {}

    def first(self, window: ScoredWindow) -> int:
        """The first token that the window scores: without a BOS a window's own first has no prediction."""
        return max(window.first_scored, self._first_predicted(window))

    def _first_predicted(self, window: ScoredWindow) -> int:
        return window.start + (1 if self.bos is None else 0)

    def scored(self, outcome: Outcome, index: int, length: int) -> list[Scored]:
        """The scored tokens that count at ``length`` (shorter than the pass only for curves), of document ``index``."""
        special = len(self.prefix)
        found, begin = [], 0
        for window in self.windows:
            first = self.first(window)
            end = begin + max(window.stop - first, 0)
            last = min(window.stop, window.start + length - special) if length < self.length else window.stop
            nll = outcome["nll"][begin : begin + max(last - first, 0)]
            size, words = self.document.bytes_between(first, last), self.document.words_between(first, last)
            found.append(Scored(index, nll, first - window.start + special, size, words))
            begin = end
        return found


class Pass(NamedTuple):
    """One reading of all documents, which answers these ``lengths``: a unit per document."""

    lengths: list[int]
    units: list[WindowsUnit]


@dataclass(frozen=True, eq=False)
class PerplexityPlan(Plan):
    """``bos`` is the token every window starts with, or with ``rolling`` every document. ``chunk`` is the most tokens
    between two generation steps, ``most_windows`` the most windows of a document under ``tail``. ``skipped`` documents
    are too short. ``position_bin`` is the tokens of a bin of the loss by position; None: bins double."""

    model: str
    trained_length: int
    subjects: list[Subject]
    documents: list[Document]
    skipped: list[DocumentInfo]
    lengths: list[int]
    protocol: Protocol
    stride: int
    tail: int
    bos: int | None
    chunk: int | None
    most_windows: int | None = None
    position_bin: int | None = None

    @cached_property
    def cost(self) -> Cost:
        by_length: dict[int, Cost] = {}
        total = Cost()
        for subject in self.subjects:
            for length, _ in self._lengths_of_passes(subject):
                if length not in by_length:
                    by_length[length] = self._cost_at(length)
                total += by_length[length]
        return total

    def _cost_at(self, length: int) -> Cost:
        """Of one method."""
        windows = [self.windows(document, length) for document in self._texts]
        return Cost(sum(of.tokens for of in windows), sum(map(len, windows)), len(windows))

    @cached_property
    def units(self) -> Sequence[Unit]:
        return [unit for passes in self.passes for one in passes for unit in one.units]

    @cached_property
    def passes(self) -> list[list[Pass]]:
        """Those of each subject."""
        return [
            [
                Pass(answered, [self._unit(subject, document, length) for document in self._texts])
                for length, answered in self._lengths_of_passes(subject)
            ]
            for subject in self.subjects
        ]

    def _lengths_of_passes(self, subject: Subject) -> list[tuple[int, list[int]]]:
        """(length of the pass, lengths it answers): one pass for a whole curve unless the schedule depends on the
        length."""
        by_length = subject.method.depends_on_length(subject.patch.geometry)
        if self.protocol == "curve" and not by_length:
            return [(self.lengths[-1], self.lengths)]
        return [(length, [length]) for length in self.lengths]

    @cached_property
    def _texts(self) -> list[Document]:
        """The documents as the units read them."""
        if self.protocol != "rolling" or self.bos is None:
            return self.documents
        return [document.after(self.bos) for document in self.documents]

    def _unit(self, subject: Subject, document: Document, length: int) -> WindowsUnit:
        return WindowsUnit(
            subject=subject,
            length=length,
            name=document.name,
            document=document,
            windows=self.windows(document, length),
            bos=None if self.protocol == "rolling" else self.bos,
            chunk=self.chunk,
        )

    def windows(self, document: Document, length: int) -> Windows:
        """Windows at ``length`` tokens, the BOS counted in."""
        special = 0 if self.bos is None else 1
        tokens, room = len(document.token_ids), length - special
        if self.protocol == "rolling":
            return protocols.rolling(tokens, length)
        if self.protocol == "curve":
            return protocols.curve(tokens, room)
        if self.protocol == "sliding":
            return protocols.sliding(tokens, room, self.stride)
        if self.protocol == "disjoint":
            return protocols.disjoint(tokens, room)
        return protocols.tail(tokens, room, self.tail, self.lengths[-1] - special, self.stride, self.most_windows)

    def parameters(self) -> dict[str, Any]:
        """The protocol's parameters that had an effect."""
        if self.protocol == "sliding":
            return {"stride": self.stride}
        if self.protocol == "tail":
            most = {} if self.most_windows is None else {"windows": self.most_windows}
            return {"stride": self.stride, "tail": self.tail, **most}
        return {}

    def result(self, outcomes: Sequence[Outcome]) -> PerplexityResult:
        remaining = iter(outcomes)
        return PerplexityResult(
            model=self.model,
            trained_length=self.trained_length,
            protocol=self.protocol,
            parameters=self.parameters(),
            bos=self.bos is not None,
            position_bin=self.position_bin,
            lengths=self.lengths,
            documents=[document.info for document in self.documents],
            skipped=self.skipped,
            methods=[
                self._method(subject, passes, remaining)
                for subject, passes in zip(self.subjects, self.passes, strict=True)
            ],
        )

    def _method(self, subject: Subject, passes: list[Pass], remaining: Iterator[Outcome]) -> MethodResult:
        lengths, hashes = [], {}
        longest: list[Scored] = []
        for answered, units in passes:
            measured = [(unit, next(remaining)) for unit in units]
            for length in answered:
                longest = [s for index, (u, o) in enumerate(measured) for s in u.scored(o, index, length)]
                lengths.append(length_result(length, longest, len(self.documents)))
                hashes[length] = units[0].resolved.frequency_hash
        return MethodResult(
            **subject.described(self.lengths[-1]),
            frequency_hashes=hashes,
            passes=sum(len(unit.windows) for one in passes for unit in one.units),
            lengths=lengths,
            nll_by_position=position_buckets(longest, self.position_bin),
        )


def prefix_of(wanted: Bos, served: ServedModel) -> int | None:
    """The token before a document in ``rolling``: with `auto`, as in lm-evaluation-harness, BOS if there is one and
    end-of-text otherwise.

    Raises:
        InvalidEvaluation: when a BOS is wanted and the model has none.
    """
    if wanted != "auto":
        return bos_of(wanted, served)
    eos: int | None = served.tokenizer.eos_token_id
    return eos if served.bos_token_id is None else served.bos_token_id


def rolling_lengths(wanted: list[int], documents: Sequence[Document], special: int, settings: Settings) -> list[int]:
    """``wanted`` itself: in ``rolling`` a document may be shorter than a window.

    Raises:
        InvalidEvaluation: for too many lengths, or a document without a token to predict.
    """
    shortest = min(documents, key=lambda document: len(document.token_ids))
    if len(shortest.token_ids) + special < 2:
        raise too_short(shortest)
    at_most("lengths", len(wanted), settings.max_lengths)
    return wanted


def plan_of(request: PerplexityRequest, models: ModelRegistry, settings: Settings) -> PerplexityPlan:
    """Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    bos = prefix_of(request.bos, served) if request.protocol == "rolling" else bos_of(request.bos, served)
    special = 0 if bos is None else 1
    documents, skipped = documents_by_length(request, served, special, settings)
    wanted = request.length_values()
    if request.protocol == "rolling" and wanted is not None:
        lengths = rolling_lengths(wanted, documents, special, settings)
    else:
        lengths = lengths_of(wanted, served, documents, special, settings)
    tail = request.tail or min(DEFAULT_TAIL, lengths[0] - 1)
    if tail >= lengths[0]:
        raise InvalidEvaluation("tail", f"must be below the shortest length ({lengths[0]})")
    room = lengths[0] - special
    plan = PerplexityPlan(
        model=served.name,
        trained_length=served.trained_length,
        subjects=subjects_of(request.methods, served, models, settings, longest=lengths[-1]),
        documents=documents,
        skipped=skipped,
        lengths=lengths,
        protocol=request.protocol,
        stride=request.stride or (lengths[-1] if request.protocol == "tail" else min(DEFAULT_STRIDE, room)),
        tail=tail,
        bos=bos,
        chunk=settings.score_chunk,
        most_windows=request.windows,
        position_bin=position_bin_of(request, lengths[-1]),
    )
    if request.protocol == "sliding" and plan.stride > room:
        raise InvalidEvaluation("stride", f"must be at most {room}: a larger one would skip tokens")
    affordable(plan, settings)
    return plan
