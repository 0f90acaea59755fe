"""The result of a RULER evaluation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from service.evaluation.formatting import percent
from service.evaluation.results import Columns, DocumentInfo, EvaluationResult, MethodInResult, Row
from service.evaluation.retrieval.results import LengthScore, PromptScore, SampleResult, scores_by_length
from service.evaluation.scores import Scores
from service.evaluation.words import best_method, beyond_reach, reaches

TaskName = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
]


class TaskScore(PromptScore):
    """``PromptScore`` of one task."""

    task: TaskName


class RulerMethod(MethodInResult):
    """Every length and task of one method."""

    tasks: list[TaskScore] = Field(description="By length and task.")
    lengths: list[LengthScore] = Field(description="Averages over all tasks.")
    effective_length: int | None = Field(
        description="The longest length whose average, and that of every shorter one, is above the threshold."
    )


class RulerResult(EvaluationResult):
    """``score`` is the share of the expected strings that are in the continuation."""

    optional: ClassVar[Columns] = {"effective_length": int}

    evaluation: Literal["ruler"] = "ruler"
    lengths: list[int]
    tasks: list[TaskName]
    samples: int = Field(description="Prompts per task and length.")
    seed: int
    threshold: float
    parameters: dict[str, Any] = Field(description="Parameters of single tasks, as they took effect.")
    bos: bool = Field(description="True when every prompt starts with the model's BOS token.")
    documents: list[DocumentInfo] = Field(description="The haystack; empty where no task has documents for it.")
    methods: list[RulerMethod]

    def rows(self) -> list[Row]:
        """One row per method, length and task."""
        return [self._row(method, at) for method in self.methods for at in method.tasks]

    def scores(self) -> Scores:
        """The average over all tasks."""
        by_method = [scores_by_length(method.lengths, method.tasks) for method in self.methods]
        return Scores("RULER score", False, by_method, effective_lengths=self._effective_lengths())

    def outputs(self) -> list[SampleResult]:
        return [output for method in self.methods for task in method.tasks for output in task.outputs]

    def sentences(self) -> list[str]:
        """The best method, and the effective length of each."""
        reached = reaches(self, self._effective_lengths())
        effective = f"Effective length, above {percent(self.threshold)}: {reached}."
        return [*best_method(self), effective, *self.cautions()]

    def cautions(self) -> list[str]:
        """Encodings that end before the longest length."""
        return beyond_reach(self, self.lengths[-1])

    def _effective_lengths(self) -> list[int | None]:
        return [method.effective_length for method in self.methods]

    def _row(self, method: RulerMethod, at: TaskScore) -> Row:
        return {
            "method": method.label,
            "model": method.model,
            "length": at.length,
            "task": at.task,
            **at.row(),
            "seed": self.seed,
            "effective_length": method.effective_length,
            "trained_length": self.trained_length,
        }
