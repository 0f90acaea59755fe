"""The result of a long perplexity evaluation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from service.evaluation.formatting import listed
from service.evaluation.perplexity.results import PARAMETERS, Protocol, protocol_columns
from service.evaluation.results import Columns, DocumentInfo, EvaluationResult, MethodInResult, Row
from service.evaluation.scores import INTERVAL, Group, Interval, Score, Scores, interval_columns
from service.evaluation.statistics.pieces import pieces_of
from service.evaluation.words import best_method, beyond_reach, cautions_of, near_reference

FEW = 30
"""Key tokens: with a deviation of one nat, fewer leave a 95 % interval wider than a factor of two."""


class EvaluatorInfo(MethodInResult):
    """The model that chose the key tokens, its parameters, and their number among all tokens that are read."""

    long_context: int
    short_context: int
    stride: int
    alpha: float
    beta: float
    tokens: int
    key_tokens: int


class LongLengthResult(BaseModel):
    """One method at one length. Sums and means are natural-log NLL over the key tokens among the scored ones. Without a
    key token, ``key_tokens`` is 0 and the long perplexity null.

    ``perplexity`` is over all scored tokens, for contrast.
    """

    length: int
    long_perplexity: float | None = Field(description="exp(nll_mean); null where no scored token is key.")
    nll_sum: float
    nll_mean: float | None
    key_tokens: int
    key_fraction: float = Field(description="Of the scored tokens.")
    perplexity: float
    tokens_scored: int
    interval: Interval | None = Field(description="Of the long perplexity, over documents, or quarters of one.")
    groups: list[Group] = Field(
        description="(NLL sum, tokens) over key tokens, by document or block as in `perplexity`."
    )


class LongMethodResult(MethodInResult):
    """Every length of one method."""

    lengths: list[LongLengthResult]


class LongPerplexityResult(EvaluationResult):
    """A whole evaluation."""

    optional: ClassVar[Columns] = {**INTERVAL, "long_perplexity": float, "nll_mean": float, **PARAMETERS}

    evaluation: Literal["long_perplexity"] = "long_perplexity"
    evaluator: EvaluatorInfo
    protocol: Protocol
    parameters: dict[str, Any] = Field(description="Stride and tail of the protocol as they took effect.")
    bos: bool = Field(description="True when every window starts with the model's BOS token.")
    lengths: list[int]
    documents: list[DocumentInfo]
    skipped: list[DocumentInfo] = Field([], description="Documents left out as shorter than the longest length.")
    methods: list[LongMethodResult]

    def models(self) -> set[str]:
        """Those of the methods, and the evaluator's."""
        return super().models() | {self.evaluator.model}

    def rows(self) -> list[Row]:
        """One row per method and length."""
        return [self._row(method, at) for method in self.methods for at in method.lengths]

    def scores_the_same(self) -> bool:
        """Under ``curve`` a longer length scores more of the document."""
        return self.protocol != "curve"

    def scores(self) -> Scores:
        """Perplexity of key tokens, at the lengths that score any."""
        by_method = [
            {
                at.length: Score(at.long_perplexity, at.interval, pieces_of(at.groups, len(self.documents)))
                for at in method.lengths
                if at.long_perplexity is not None
            }
            for method in self.methods
        ]
        return Scores("perplexity of key tokens", True, by_method)

    def sentences(self) -> list[str]:
        """The best method, and the lengths at which each stays near the reference."""
        if not any(self.scores().by_method):
            return ["Nothing could be measured: no scored token needs long context."]
        return [*best_method(self), *near_reference(self), *self.cautions()]

    def key_tokens(self) -> dict[int, int]:
        """Key tokens by length, ascending; they are the same for all methods."""
        return dict(sorted({at.length: at.key_tokens for method in self.methods for at in method.lengths}.items()))

    def cautions(self) -> list[str]:
        """The lengths with too few key tokens for a number, and the cautions of a perplexity."""
        few = {length: count for length, count in self.key_tokens().items() if count < FEW}
        documents = cautions_of(self.documents, self.skipped, self.methods[0].lengths[-1].groups)
        shared = [*beyond_reach(self, self.lengths[-1]), *documents]
        if not few:
            return shared
        counts = f"{min(few.values())} to {max(few.values())}" if len(set(few.values())) > 1 else f"{min(few.values())}"
        lengths = listed([f"{length:,}" for length in few])
        return [
            f"Key tokens are too few at {lengths} tokens ({counts}; {FEW} are the least): these numbers mean little.",
            *shared,
        ]

    def _row(self, method: LongMethodResult, at: LongLengthResult) -> Row:
        evaluator = self.evaluator
        return {
            "method": method.label,
            "model": method.model,
            "length": at.length,
            "long_perplexity": at.long_perplexity,
            **interval_columns(at.interval),
            "nll_mean": at.nll_mean,
            "nll_sum": at.nll_sum,
            "key_tokens": at.key_tokens,
            "key_fraction": at.key_fraction,
            "perplexity": at.perplexity,
            "tokens_scored": at.tokens_scored,
            **protocol_columns(self.protocol, self.parameters, self.bos),
            "evaluator": evaluator.label,
            "evaluator_model": evaluator.model,
            "long_context": evaluator.long_context,
            "short_context": evaluator.short_context,
            "stride": evaluator.stride,
            "alpha": evaluator.alpha,
            "beta": evaluator.beta,
            "trained_length": self.trained_length,
        }
