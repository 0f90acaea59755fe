"""RULER: every task at every length, averages, and how long a context is effective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.evaluation.checks import InvalidEvaluation, affordable, bos_of, documents_of, subjects_of
from service.evaluation.retrieval.grid import (
    PromptsPlan,
    check_fits,
    check_grid,
    eos_of,
    grid_lengths,
    haystack_of,
    samples_of,
)
from service.evaluation.retrieval.prompts import PromptTokenizer
from service.evaluation.retrieval.results import LengthScore, SampleResult
from service.evaluation.retrieval.scores import recall
from service.evaluation.ruler.niah import needs_documents
from service.evaluation.ruler.request import RulerRequest
from service.evaluation.ruler.results import RulerMethod, RulerResult, TaskName, TaskScore
from service.evaluation.ruler.tasks import draft_of
from service.evaluation.unit import Outcome, Subject
from service.models.registry import ModelRegistry
from service.settings import Settings


@dataclass(frozen=True, eq=False)
class RulerPlan(PromptsPlan):
    """Prompts in the order of ``tasks``, ``request.samples`` of each."""

    request: RulerRequest
    tasks: list[TaskName]

    def result(self, outcomes: Sequence[Outcome]) -> RulerResult:
        request = self.request
        measured = self.measured(outcomes, recall)
        return RulerResult(
            **self.in_every_result(),
            tasks=self.tasks,
            samples=request.samples,
            seed=request.seed,
            threshold=request.threshold,
            parameters=request.parameters(),
            methods=[self._method(*pair) for pair in zip(self.subjects, measured, strict=True)],
        )

    def _method(self, subject: Subject, by_length: dict[int, list[SampleResult]]) -> RulerMethod:
        cells = self.cells(by_length, self.tasks, self.request.samples)
        tasks = [TaskScore(task=task, **fields) for task, fields in cells]
        lengths = self.lengths_of(by_length)
        effective = effective_length(lengths, self.request.threshold)
        described = subject.described(self.lengths[-1])
        return RulerMethod(**described, tasks=tasks, lengths=lengths, effective_length=effective)


def effective_length(lengths: Sequence[LengthScore], threshold: float) -> int | None:
    """The longest of the ascending ``lengths`` up to which every average is above ``threshold``."""
    effective = None
    for at in lengths:
        if at.score <= threshold:
            break
        effective = at.length
    return effective


def plan_of(request: RulerRequest, models: ModelRegistry, settings: Settings) -> RulerPlan:
    """Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    lengths = grid_lengths(request.length_values(), served, settings)
    subjects = subjects_of(request.methods, served, models, settings, longest=lengths[-1])
    tasks = list(dict.fromkeys(request.tasks))
    check_grid(lengths, len(tasks) * request.samples, subjects, settings)
    uses_documents = any(needs_documents(task) for task in tasks)
    defaults = {name: RulerRequest.model_fields[name].default for name in ("input", "names", "max_tokens")}
    given = [name for name, default in defaults.items() if getattr(request, name) not in (None, default)]
    if given and not uses_documents:
        raise InvalidEvaluation(given[0], f"without effect: {', '.join(tasks)} use no documents")
    documents = documents_of(request, served, settings) if uses_documents else []
    haystack = haystack_of(request.texts(), documents) if uses_documents else None
    drafts = {task: [draft_of(task, sample, request, haystack) for sample in range(request.samples)] for task in tasks}
    tokenizer = PromptTokenizer(served.tokenizer, bos_of("auto", served))
    check_fits({str(task): group for task, group in drafts.items()}, lengths[0], tokenizer)
    plan = RulerPlan(
        model=served.name,
        trained_length=served.trained_length,
        subjects=subjects,
        lengths=lengths,
        documents=documents,
        samples=samples_of([draft for group in drafts.values() for draft in group], lengths, tokenizer),
        tokenizer=tokenizer,
        eos_token_ids=eos_of(subjects, models),
        chunk=settings.score_chunk,
        request=request,
        tasks=tasks,
    )
    affordable(plan, settings)
    return plan
