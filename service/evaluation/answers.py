"""Results that answer a question in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from service.evaluation.results import EvaluationResult, Partial


class InWords(Protocol):
    """An answer: its first sentence is the answer itself, the others are evidence, doubt and use."""

    words: list[str]


class AnsweringResult(EvaluationResult):
    """A result with an ``answer``. Its first sentence is also the title, and has the scope of a partial result."""

    if TYPE_CHECKING:
        answer: InWords

    def end_early(self, partial: Partial) -> None:
        super().end_early(partial)
        self.answer.words[0] = self._scoped(self.answer.words[0])

    def sentences(self) -> list[str]:
        """The answer and all that it rests on."""
        return self.answer.words

    def title(self) -> str:
        """The answer in one sentence."""
        return self.answer.words[0]
