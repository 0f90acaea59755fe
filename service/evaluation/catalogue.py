"""Every evaluation: its name, its body, its plan and its result. Adding one is a folder and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.evaluation.answers import RESULTS
from service.evaluation.long_perplexity import plan as long_perplexity_plan
from service.evaluation.long_perplexity import request as long_perplexity
from service.evaluation.perplexity import plan as perplexity_plan
from service.evaluation.perplexity import request as perplexity
from service.evaluation.probe import plan as probe_plan
from service.evaluation.probe import request as probe
from service.evaluation.request import EvaluationRequest
from service.evaluation.results import EvaluationResult
from service.evaluation.retrieval import depths
from service.evaluation.retrieval import request as retrieval
from service.evaluation.ruler import plan as ruler_plan
from service.evaluation.ruler import request as ruler
from service.evaluation.sweep import plan as sweep_plan
from service.evaluation.sweep import request as sweep
from service.evaluation.unit import Plan
from service.models.registry import ModelRegistry
from service.settings import Settings


@dataclass(frozen=True)
class Evaluation:
    """``plan`` raises UnknownModel and InvalidEvaluation. ``summary`` is what it tells; ``example`` makes a body that
    works on the demo models."""

    request: type[EvaluationRequest]
    plan: Callable[[Any, ModelRegistry, Settings], Plan]
    example: Callable[[], dict[str, Any]]
    summary: str

    @property
    def name(self) -> str:
        """As it stands in routes and in ``evaluation`` fields."""
        return str(self.request.model_fields["evaluation"].default)

    @property
    def result(self) -> type[EvaluationResult]:
        return RESULTS[self.name]


_ALL = (
    Evaluation(
        perplexity.PerplexityRequest,
        perplexity_plan.plan_of,
        perplexity.example,
        "How well documents are predicted, by context length.",
    ),
    Evaluation(
        long_perplexity.LongPerplexityRequest,
        long_perplexity_plan.plan_of,
        long_perplexity.example,
        "How well the tokens are predicted that need a long context.",
    ),
    Evaluation(
        retrieval.PasskeyRequest,
        depths.passkey_plan,
        retrieval.passkey_example,
        "Whether a number hidden in filler is found again, by length and depth.",
    ),
    Evaluation(
        retrieval.NeedleRequest,
        depths.needle_plan,
        retrieval.needle_example,
        "Whether a sentence hidden in documents is found again, by length and depth.",
    ),
    Evaluation(
        ruler.RulerRequest,
        ruler_plan.plan_of,
        ruler.example,
        "RULER's synthetic tasks by length, and the effective length.",
    ),
    Evaluation(
        probe.ProbeRequest,
        probe_plan.plan_of,
        probe.example,
        "Where heads attend, how far the model copies, and its loss by position.",
    ),
    Evaluation(
        sweep.SweepRequest,
        sweep_plan.plan_of,
        sweep.example,
        "Methods, factors, lengths and evaluations at once: the best method, and the cheapest that is good enough.",
    ),
)

EVALUATIONS = {evaluation.name: evaluation for evaluation in _ALL}


def plan_of(request: EvaluationRequest, models: ModelRegistry, settings: Settings) -> Plan:
    """The plan of any evaluation.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    return EVALUATIONS[request.evaluation].plan(request, models, settings)
