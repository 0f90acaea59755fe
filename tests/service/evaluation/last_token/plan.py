"""One pass per method and length."""

# ruff: noqa: TID252 - the test copies this folder into the service
from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from service.evaluation.checks import documents_of, lengths_of, subjects_of
from service.evaluation.cost import Cost
from service.evaluation.scoring.chunks import most_tokens
from service.evaluation.scoring.token_scores import token_nll
from service.evaluation.unit import Outcome, Plan, Subject, Unit
from service.models.registry import ModelRegistry
from service.settings import Settings

from .request import LastTokenRequest
from .results import LastTokenMethod, LastTokenResult


@dataclass(frozen=True, eq=False)
class LastTokenUnit(Unit):
    kind: ClassVar[str] = "last_token"
    token_ids: list[int]
    chunk: int | None

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def inputs(self) -> dict[str, Any]:
        return {"token_ids": self.token_ids, "chunk": most_tokens(self.chunk, self.subject.patch.model.device)}

    def run(self) -> Generator[int, None, Outcome]:
        with self.slot() as slot:
            nll = yield from token_nll(self.subject.patch, self.token_ids, slot, self.chunk)
        return {"nll": nll[-1:]}

    def summary(self, outcome: Outcome) -> dict[str, float]:
        return {"nll": float(outcome["nll"][0])}


@dataclass(frozen=True, eq=False)
class LastTokenPlan(Plan):
    model: str
    trained_length: int
    subjects: list[Subject]
    lengths: list[int]
    passes: list[Unit]

    @property
    def units(self) -> Sequence[Unit]:
        return self.passes

    @property
    def cost(self) -> Cost:
        return Cost(sum(unit.tokens for unit in self.units), len(self.units), len(self.units))

    def result(self, outcomes: Sequence[Outcome]) -> LastTokenResult:
        found = iter(outcomes)
        methods = [
            LastTokenMethod(
                label=subject.label,
                pe=subject.patch.describe(subject.method, self.lengths[-1]),
                model=subject.model,
                nll={length: float(next(found)["nll"][0]) for length in self.lengths},
            )
            for subject in self.subjects
        ]
        return LastTokenResult(model=self.model, trained_length=self.trained_length, methods=methods)


def plan_of(request: LastTokenRequest, models: ModelRegistry, settings: Settings) -> LastTokenPlan:
    served = models.get(request.model)
    documents = documents_of(request, served, settings)
    lengths = lengths_of(request.length_values(), served, documents, 0, settings)
    subjects = subjects_of(request.methods, served, models, settings, longest=lengths[-1])
    passes: list[Unit] = [
        LastTokenUnit(subject, length, documents[0].name, documents[0].token_ids[:length], settings.score_chunk)
        for subject in subjects
        for length in lengths
    ]
    return LastTokenPlan(served.name, served.trained_length, subjects, lengths, passes)
