"""The pass that all retrieval evaluations make: one prompt, the scores of its answer, the greedy continuation."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from service.evaluation.documents import token_digest
from service.evaluation.retrieval.prompts import Sample
from service.evaluation.scoring.chunks import most_tokens
from service.evaluation.scoring.token_scores import Reading
from service.evaluation.unit import Outcome, Unit


@dataclass(frozen=True, eq=False)
class RetrievalUnit(Unit):
    """``token_ids`` int64 of the greedy continuation, an end token included; ``answer_logprobs`` float64 and
    ``answer_ranks`` int64 of the expected answer's tokens, each after the right ones before it (1 is the most likely).

    The prompt is read once: the answer is scored after it, forgotten, and the continuation decoded.
    """

    kind: ClassVar[str] = "retrieval"
    sample: Sample
    eos_token_ids: tuple[int, ...]
    chunk: int | None

    @property
    def tokens(self) -> int:
        return self.sample.tokens

    @property
    def prompt(self) -> str:
        return self.sample.text

    def inputs(self) -> dict[str, Any]:
        return {
            "prompt": token_digest(self.sample.prompt_ids),
            "answer": self.sample.answer_ids.tolist(),
            "new_tokens": self.sample.new_tokens,
            "eos": list(self.eos_token_ids),
            "chunk": most_tokens(self.chunk, self.subject.patch.model.device),
        }

    def run(self) -> Generator[int, None, Outcome]:
        sample = self.sample
        with self.slot() as slot:
            tokens = len(sample.prompt_ids) + max(len(sample.answer_ids), sample.new_tokens)
            reading = Reading(self.subject.patch, slot, tokens)
            last = yield from reading.prefill(sample.prompt_ids.tolist(), self.chunk)
            answer = yield from reading.answer(last, sample.answer_ids.tolist(), self.chunk)
            token_ids = yield from reading.decode(last, sample.new_tokens, self.eos_token_ids)
            if unread := sample.new_tokens - len(token_ids):
                yield unread  # ended early: what was promised is done
        return {"token_ids": token_ids, "answer_logprobs": answer.logprobs, "answer_ranks": answer.ranks}

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {
            "answer_nll": float(-outcome["answer_logprobs"].mean()),
            "answer_accuracy": float((outcome["answer_ranks"] == 1).mean()),
        }
