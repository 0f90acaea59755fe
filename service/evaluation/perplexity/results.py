"""The result of a perplexity evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from service.evaluation.results import Columns, DocumentInfo, EvaluationResult, MethodInResult, Row, documents_text
from service.evaluation.scores import INTERVAL, Score, Scores, interval_columns
from service.evaluation.statistics.nll import LengthResult, PositionBin, PositionBucket
from service.evaluation.statistics.pieces import pieces_of
from service.evaluation.words import best_method, beyond_reach, cautions_of, near_reference

Protocol = Literal["curve", "sliding", "disjoint", "tail", "rolling"]

PARAMETERS: Columns = {"protocol_stride": int, "protocol_tail": int, "protocol_windows": int}
"""Columns of the protocol's parameters, empty where the protocol has no such parameter."""


def protocol_columns(protocol: Protocol, parameters: Mapping[str, Any], bos: bool) -> Row:
    """The protocol as it took effect, in columns of a table."""
    columns = {name: parameters.get(name.removeprefix("protocol_")) for name in PARAMETERS}
    return {"protocol": protocol, **columns, "bos": bos}


class MethodResult(MethodInResult):
    """Every length of one method, with the encoding that was in effect at each length."""

    frequency_hashes: dict[int, str] = Field(description="Hash of the resolved frequencies, by length.")
    passes: int = Field(description="Forward passes over documents that this method took.")
    lengths: list[LengthResult]
    nll_by_position: list[PositionBucket] = Field(description="At the longest length.")


class PerplexityResult(EvaluationResult):
    """A whole evaluation."""

    optional: ClassVar[Columns] = {**INTERVAL, "word_perplexity": float, **PARAMETERS}

    evaluation: Literal["perplexity"] = "perplexity"
    protocol: Protocol
    parameters: dict[str, Any] = Field(description="Window, stride and tail as they took effect.")
    bos: bool = Field(
        description="True when every window starts with the model's BOS token. With `rolling`: when every document "
        "starts with it, or with end-of-text where there is none."
    )
    position_bin: PositionBin = None
    lengths: list[int]
    documents: list[DocumentInfo]
    skipped: list[DocumentInfo] = Field([], description="Documents left out as shorter than the longest length.")
    methods: list[MethodResult]

    def rows(self) -> list[Row]:
        """One row per method and length."""
        return [self._row(method, at) for method in self.methods for at in method.lengths]

    def scores(self) -> Scores:
        """Perplexity by context length."""
        documents = len(self.documents)
        by_method = [
            {at.length: Score(at.perplexity, at.interval, pieces_of(at.groups, documents)) for at in m.lengths}
            for m in self.methods
        ]
        return Scores("perplexity", True, by_method, note=self.interval_note())

    def scores_the_same(self) -> bool:
        """Under ``curve`` a longer length scores more of the document."""
        return self.protocol != "curve"

    def sentences(self) -> list[str]:
        """The best method, and the lengths at which each stays near the reference."""
        return [*best_method(self), *near_reference(self), *self.cautions()]

    def cautions(self) -> list[str]:
        """Encodings that end before the longest length. Documents that share text, one with most of the scored tokens,
        and those left out."""
        shared = cautions_of(self.documents, self.skipped, self.methods[0].lengths[-1].groups)
        return [*beyond_reach(self, self.lengths[-1]), *shared]

    def title(self) -> str:
        """Model, protocol and documents in one line."""
        return f"{super().title()}: {self.protocol_note()}, {documents_text(self.documents)}"

    def protocol_note(self) -> str:
        """The protocol with the parameters that had an effect, such as ``sliding (stride 256)``."""
        parameters = ", ".join(f"{name} {value}" for name, value in self.parameters.items())
        return f"{self.protocol} ({parameters})" if parameters else self.protocol

    def interval_note(self) -> str:
        """The units that the intervals are over."""
        kinds = {at.interval.kind for method in self.methods for at in method.lengths if at.interval}
        if not kinds:
            return "too few documents or tokens for an interval"
        over = {"documents": "documents", "quarters": "quarters of the document", "blocks": "blocks of 64 tokens"}
        return f"95 % interval over {' and '.join(over[kind] for kind in sorted(kinds))}"

    def _row(self, method: MethodResult, at: LengthResult) -> Row:
        return {
            "method": method.label,
            "model": method.model,
            "length": at.length,
            "perplexity": at.perplexity,
            **interval_columns(at.interval),
            "nll_mean": at.nll_mean,
            "nll_sum": at.nll_sum,
            "bits_per_byte": at.bits_per_byte,
            "byte_perplexity": at.byte_perplexity,
            "word_perplexity": at.word_perplexity,
            "perplexity_window_mean": at.perplexity_window_mean,
            "tokens_scored": at.tokens_scored,
            "bytes_scored": at.bytes_scored,
            "words_scored": at.words_scored,
            "windows": at.windows,
            "documents": at.documents,
            "frequency_hash": method.frequency_hashes[at.length],
            **protocol_columns(self.protocol, self.parameters, self.bos),
            "trained_length": self.trained_length,
        }
