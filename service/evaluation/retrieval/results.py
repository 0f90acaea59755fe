"""The results of the retrieval evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from service.evaluation.results import DocumentInfo, EvaluationResult, MethodInResult, Output, Row
from service.evaluation.scores import Interval, Score, Scores, interval_columns
from service.evaluation.words import best_method, beyond_reach, found_up_to


class SampleResult(Output):
    """One prompt. ``answer_*`` score the expected answer's tokens, each predicted after the right ones before it.

    They are the mean NLL in nats, and the share of tokens that were the most likely ones. They show retrieval by models
    too small to answer.
    """

    name: str
    prompt_tokens: int
    score: float
    answer_nll: float
    answer_accuracy: float
    answer_tokens: int
    expected: list[str]
    output: str = Field(description="The continuation, up to 200 characters.")

    def heading(self) -> str:
        return f"{self.name}: {self.prompt_tokens:,} tokens; expected: {', '.join(self.expected)}"


class Averages(BaseModel):
    """Means over samples. ``score`` is from 0 to 1."""

    samples: int
    score: float
    interval: Interval
    answer_nll: float
    answer_accuracy: float

    def row(self) -> Row:
        return {
            "score": self.score,
            **interval_columns(self.interval),
            "answer_nll": self.answer_nll,
            "answer_accuracy": self.answer_accuracy,
            "samples": self.samples,
        }


class LengthScore(Averages):
    """One method at one length, over all its prompts."""

    length: int


class PromptScore(LengthScore):
    """One method at one length, over the prompts of one kind."""

    outputs: list[SampleResult]


def scores_by_length(lengths: Sequence[LengthScore], prompts: Sequence[PromptScore]) -> dict[int, Score]:
    """The scores of one method, with those of its ``prompts``."""
    samples: dict[int, list[float]] = defaultdict(list)
    for kind in prompts:
        samples[kind.length] += [output.score for output in kind.outputs]
    return {at.length: Score(at.score, at.interval, samples=samples[at.length]) for at in lengths}


class DepthScore(PromptScore):
    """``PromptScore`` at one depth, the share of the haystack before the hidden text."""

    depth: float


class DepthMethod(MethodInResult):
    """The grid of one method, and its rows' averages."""

    cells: list[DepthScore] = Field(description="By length and depth.")
    lengths: list[LengthScore] = Field(description="Over all depths.")


class DepthResult(EvaluationResult):
    """A grid of lengths and depths for every method."""

    lengths: list[int]
    depths: list[float]
    samples: int = Field(description="Prompts per length and depth.")
    seed: int
    max_new_tokens: int
    bos: bool = Field(description="True when every prompt starts with the model's BOS token.")
    documents: list[DocumentInfo] = Field(description="The haystack; empty where it is the published filler.")
    methods: list[DepthMethod]

    def rows(self) -> list[Row]:
        """One row per method, length and depth."""
        return [self._row(method, cell) for method in self.methods for cell in method.cells]

    def scores(self) -> Scores:
        """The share found, over all depths."""
        return Scores("share found", False, [scores_by_length(method.lengths, method.cells) for method in self.methods])

    def outputs(self) -> list[SampleResult]:
        return [output for method in self.methods for cell in method.cells for output in cell.outputs]

    def sentences(self) -> list[str]:
        """The best method, and the length up to which each finds half."""
        return [*best_method(self), *found_up_to(self), *self.cautions()]

    def cautions(self) -> list[str]:
        """Encodings that end before the longest length."""
        return beyond_reach(self, self.lengths[-1])

    def _row(self, method: DepthMethod, cell: DepthScore) -> Row:
        return {
            "method": method.label,
            "model": method.model,
            "length": cell.length,
            "depth": cell.depth,
            **cell.row(),
            "seed": self.seed,
            "trained_length": self.trained_length,
        }


class PasskeyResult(DepthResult):
    """``score`` is the share of prompts whose key was the first integer in the continuation."""

    evaluation: Literal["passkey"] = "passkey"
    digits: int


class NeedleResult(DepthResult):
    """``score`` is the share of the expected strings in the continuation."""

    evaluation: Literal["needle"] = "needle"
    needle: str = Field("", description="The hidden text; results of earlier versions have none, as of the next two.")
    question: str = ""
    answer: str = Field("", description="The text whose likelihood after the question is measured.")
    expected: list[str]
