"""What a RULER evaluation returns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from service.evaluation.results import DocumentInfo, EvaluationResult, MethodInResult, Row
from service.evaluation.retrieval.results import LengthScore, SampleResult

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


class TaskScore(LengthScore):
    """One method at one length on one task."""

    task: TaskName
    outputs: list[SampleResult]


class RulerMethod(MethodInResult):
    """Every length and task of one method."""

    tasks: list[TaskScore] = Field(description="By length and task.")
    lengths: list[LengthScore] = Field(description="Averages over all tasks.")
    effective_length: int | None = Field(
        description="The longest length whose average, and that of every shorter one, is above the threshold."
    )


class RulerResult(EvaluationResult):
    """``score`` is the share of the expected strings that are in the continuation."""

    evaluation: Literal["ruler"] = "ruler"
    lengths: list[int]
    tasks: list[TaskName]
    samples: int = Field(description="Prompts per task and length.")
    seed: int
    threshold: float
    parameters: dict[str, Any] = Field(description="Of single tasks, as they took effect.")
    bos: bool = Field(description="Whether every prompt starts with the model's BOS token.")
    documents: list[DocumentInfo] = Field(description="The haystack; empty where no task has documents for it.")
    methods: list[RulerMethod]

    def rows(self) -> list[Row]:
        """One row per method, length and task."""
        return [self._row(method, at) for method in self.methods for at in method.tasks]

    def _row(self, method: RulerMethod, at: TaskScore) -> Row:
        return {
            "method": method.label,
            "model": method.model,
            "length": at.length,
            "task": at.task,
            **at.row(),
            "effective_length": method.effective_length,
            "trained_length": self.trained_length,
        }
