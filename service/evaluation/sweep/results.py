"""The result of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, Field

from service.evaluation.catalogue import IN_SWEEPS, union_of
from service.evaluation.cost import EncodingCost
from service.evaluation.formatting import listed, short_number
from service.evaluation.results import Columns, EvaluationResult, MethodInResult, Output, Partial, Row, name_of
from service.evaluation.scores import ENDS, Interval, Overview, Score, Scores, interval_columns
from service.evaluation.statistics.separation import verdict_note

if TYPE_CHECKING:
    PartResult = EvaluationResult
else:
    PartResult = union_of(evaluation.result for evaluation in IN_SWEEPS)


JUDGED: Columns = {"reference": float, "limit": float, "adequate": bool, "sure": bool, "rank": int}
"""Columns of a table that are empty beyond the target length."""


class Judgement(BaseModel):
    """One method by one evaluation at the target length.

    ``reference`` is the checkpoint's own encoding within its trained length, ``limit`` what the tolerance makes of it.
    ``sure`` says whether 95 % intervals separate the method from the limit. Over the same tokens, that is the interval
    of their ratio. Over others, both intervals count, the method's and the reference's.
    """

    evaluation: int = Field(description="Index into `evaluations`.")
    measure: str
    value: float | None = Field(description="Null where nothing could be measured, as without key tokens.")
    interval: Interval | None
    reference: float | None
    limit: float | None
    adequate: bool | None = Field(description="Null where there is no value, or no limit to compare it with.")
    sure: bool
    by_ratio: bool = Field(False, description="`sure` is by the interval of the ratio, and not by `interval`.")
    is_reference: bool = Field(False, description="This is the reference itself: the target is the length of both.")
    rank: int

    @property
    def is_doubtful(self) -> bool:
        """The verdict has a question mark."""
        return self.adequate is not None and not self.sure


class SweepMethod(MethodInResult):
    """``rank`` is by the mean rank over evaluations; equal methods share it. An ``adequate`` method is so by every
    evaluation with a limit. ``sure``: each of these is sure, or one is sure of the opposite. A ``windowed`` method
    cannot read beyond its window. ``pe`` is resolved at the target length."""

    cost: EncodingCost
    windowed: bool
    judgements: list[Judgement]
    adequate: bool
    sure: bool
    rank: int

    @property
    def is_reference(self) -> bool:
        """It is what the others are compared with, in every evaluation."""
        return all(at.is_reference for at in self.judgements)


class Answer(BaseModel):
    """Labels of the best method, and of the cheapest adequate one: least cost, then the better rank. A
    windowed method comes last, unless an evaluation with a limit measures recall. Of equally good ones the first asked
    for is named, and ``words`` name all. Without a number at the target length there is no best.

    ``confidence`` is the probability that the best beats ``runner_up`` by the first evaluation. It is by Student's t
    over documents or quarters of one, and null with fewer than three of them.
    """

    best: str | None
    runner_up: str | None
    confidence: float | None
    cheapest_adequate: str | None
    cheapest_is_sure: bool | None
    words: str


class SweepResult(EvaluationResult):
    """The answer, the judgements behind it and every part's own result."""

    optional: ClassVar[Columns] = {"value": float, **ENDS, **JUDGED}

    evaluation: Literal["sweep"] = "sweep"
    target_length: int
    tolerance: float
    answer: Answer
    methods: list[SweepMethod]
    evaluations: list[PartResult]

    def scores(self) -> Scores:
        """Raises:
        TypeError: always; the parts have scores.
        """
        raise TypeError("a sweep has no scores: its parts have")

    def end_early(self, partial: Partial) -> None:
        super().end_early(partial)
        self.answer.words = self._scoped(self.answer.words)

    def sentences(self) -> list[str]:
        """The answer, the methods that are adequate by every evaluation, and the cautions of each."""
        adequate = [name for name, method in zip(self.names(), self.methods, strict=True) if method.adequate]
        several = len(self.evaluations) > 1 and adequate
        enough = [f"Good enough by every evaluation: {listed(adequate)}."] if several else []
        return [self.answer.words, *enough, *self.cautions()]

    def cautions(self) -> list[str]:
        """Those of every part, equal ones once."""
        return list(dict.fromkeys(caution for part in self.evaluations for caution in part.cautions()))

    def models(self) -> set[str]:
        """Those of all parts: one may have an evaluator."""
        return super().models().union(*(part.models() for part in self.parts()))

    def parts(self) -> Sequence[EvaluationResult]:
        return self.evaluations

    def outputs(self) -> list[Output]:
        """Those of every part."""
        return [output for part in self.parts() for output in part.outputs()]

    def title(self) -> str:
        return self.answer.words

    def overview(self) -> Overview:
        """One row per method by rank: its number by every evaluation, and whether it is good enough."""
        ranked = sorted(self.methods, key=lambda method: method.rank)
        trained = f"trained length {self.trained_length:,}"
        return Overview(
            columns=["method", *(part.evaluation.replace("_", " ") for part in self.evaluations), "good enough"],
            rows=[[name_of(method, self), *map(_text, method.judgements), _verdict(method)] for method in ranked],
            best=frozenset(row for row, method in enumerate(ranked) if self.answer.best and method.rank == 1),
            caption="; ".join(
                filter(None, [f"at {self.target_length:,} tokens", trained, self._verdict_note(), *self.cautions()])
            ),
        )

    def _verdict_note(self) -> str:
        by_ratio = any(at.by_ratio for method in self.methods for at in method.judgements)
        return verdict_note(by_ratio=by_ratio, doubtful=not all(method.sure for method in self.methods))

    def rows(self) -> list[Row]:
        """One row per method, evaluation and length. Only those at the target length are judged."""
        scores = [part.scores() for part in self.evaluations]
        return [
            row
            for index, method in enumerate(self.methods)
            for at in method.judgements
            for row in self._rows(method, at, scores[at.evaluation].by_method[index])
        ]

    def _rows(self, method: SweepMethod, at: Judgement, by_length: Mapping[int, Score]) -> Iterator[Row]:
        for length in sorted({*by_length, self.target_length}):
            score, is_judged = by_length.get(length), length == self.target_length
            yield {
                "method": method.label,
                "model": method.model,
                "length": length,
                "evaluation": self.evaluations[at.evaluation].evaluation,
                "measure": at.measure,
                "value": score.value if score else None,
                **interval_columns(score.interval if score else None, ENDS),
                **{name: getattr(at, name) if is_judged else None for name in JUDGED},
                "attentions": method.cost.attentions,
                "rotated_when_read": method.cost.rotated_when_read,
                "bias": method.cost.bias,
                "trained_length": self.trained_length,
            }


def _text(at: Judgement) -> str:
    if at.value is None:
        return "-"
    interval = f" [{at.interval.low:.3g}, {at.interval.high:.3g}]" if at.interval else ""
    return f"{short_number(at.value) if at.value >= 1 else f'{at.value:.2f}'}{interval}"


def _verdict(method: SweepMethod) -> str:
    if method.is_reference:
        return "reference"
    return ("yes" if method.adequate else "no") + ("" if method.sure else "?")
