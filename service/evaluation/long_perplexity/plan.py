"""Long perplexity: the evaluator's passes, the methods' passes, and the mean over the tokens that are key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from service.evaluation.checks import InvalidEvaluation, affordable, bounded_by, documents_by_length
from service.evaluation.cost import Cost
from service.evaluation.long_perplexity.keys import Contexts, contexts_of, is_key
from service.evaluation.long_perplexity.request import LongPerplexityRequest
from service.evaluation.long_perplexity.results import (
    EvaluatorInfo,
    LongLengthResult,
    LongMethodResult,
    LongPerplexityResult,
)
from service.evaluation.perplexity.plan import PerplexityPlan, WindowsUnit
from service.evaluation.perplexity.plan import plan_of as perplexity_plan_of
from service.evaluation.perplexity.protocols import Windows
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.statistics.nll import LengthResult
from service.evaluation.statistics.per_token import Scored, finite_exp, groups_of, interval_of, joined
from service.evaluation.unit import Outcome, Plan, Subject, Unit
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings


@dataclass(frozen=True, eq=False)
class LongPerplexityPlan(Plan):
    """``measured`` is the perplexity plan of the methods: its passes serve both kinds of numbers."""

    measured: PerplexityPlan
    evaluator: Subject
    contexts: Contexts
    alpha: float
    beta: float

    @cached_property
    def cost(self) -> Cost:
        evaluations = [unit for pair in self._evaluations for unit in pair]
        passes = sum(len(unit.windows) for unit in evaluations)
        return self.measured.cost + Cost(sum(unit.tokens for unit in evaluations), passes, len(evaluations))

    @cached_property
    def units(self) -> Sequence[Unit]:
        """Per document a long and a short pass of the evaluator, then the methods' own."""
        return [*(unit for pair in self._evaluations for unit in pair), *self.measured.units]

    @cached_property
    def _evaluations(self) -> list[tuple[WindowsUnit, WindowsUnit]]:
        return [self._evaluation(index) for index in range(len(self.measured.documents))]

    def _evaluation(self, index: int) -> tuple[WindowsUnit, WindowsUnit]:
        """Long and short pass over as much of a document as any length scores."""
        measured, contexts = self.measured, self.contexts
        document, special = measured.documents[index], 0 if measured.bos is None else 1
        last = [windows[-1] for length in measured.lengths if (windows := measured.windows(document, length))]
        scored = max(window.stop for window in last)

        def unit(length: int, windows: Windows) -> WindowsUnit:
            return WindowsUnit(self.evaluator, length, document.name, measured.bos, measured.chunk, document, windows)

        return (
            unit(contexts.long, contexts.long_windows(scored, special)),
            unit(contexts.short + contexts.stride, contexts.short_windows(scored, special)),
        )

    def reduced(self, request: Any, finished: Collection[int]) -> Any | None:
        """As of perplexity: the evaluator's passes are of no method and no length."""
        passes = 2 * len(self._evaluations)
        return self.measured.reduced(request, {position - passes for position in finished})

    def result(self, outcomes: Sequence[Outcome]) -> LongPerplexityResult:
        passes = 2 * len(self._evaluations)
        keys = [
            self._keys(long["nll"], short["nll"])
            for long, short in zip(outcomes[0:passes:2], outcomes[1:passes:2], strict=True)
        ]
        plain = self.measured.result(outcomes[passes:])
        remaining = iter(outcomes[passes:])
        methods = []
        for method, parts in zip(plain.methods, self.measured.passes, strict=True):
            at_lengths = iter(method.lengths)
            lengths = []
            for answered, units in parts:
                own = [(unit, next(remaining)) for unit in units]
                lengths += [self._at(next(at_lengths), length, own, keys) for length in answered]
            shared = method.model_dump(include={"label", "pe", "model", "reach"})
            methods.append(LongMethodResult(**shared, lengths=lengths))
        return LongPerplexityResult(
            model=plain.model,
            trained_length=plain.trained_length,
            evaluator=self._evaluator_info(keys),
            protocol=plain.protocol,
            parameters=plain.parameters,
            bos=plain.bos,
            lengths=plain.lengths,
            documents=plain.documents,
            skipped=plain.skipped,
            methods=methods,
        )

    def _keys(self, nll_long: np.ndarray, nll_short: np.ndarray) -> np.ndarray:
        """Bool of every token that the evaluator read: without a BOS it says nothing of the first."""
        found = is_key(nll_long, nll_short, self.alpha, self.beta)
        return found if self.measured.bos is not None else np.concatenate([[False], found])

    def _at(
        self, plain: LengthResult, length: int, measured: list[tuple[WindowsUnit, Outcome]], keys: list[np.ndarray]
    ) -> LongLengthResult:
        windows: list[Scored] = []
        key: list[np.ndarray] = []
        for index, (unit, outcome) in enumerate(measured):
            for window, scored in zip(unit.windows, unit.scored(outcome, index, length), strict=True):
                first = unit.first(window)
                windows.append(scored)
                key.append(keys[index][first : first + len(scored.nll)])
        groups = groups_of(windows, len(measured), key)
        nll = joined(windows)[np.concatenate(key)]
        mean = float(nll.mean()) if len(nll) else None
        return LongLengthResult(
            length=length,
            long_perplexity=None if mean is None else finite_exp(mean),
            nll_sum=float(nll.sum()),
            nll_mean=mean,
            key_tokens=len(nll),
            key_fraction=len(nll) / plain.tokens_scored,
            perplexity=plain.perplexity,
            tokens_scored=plain.tokens_scored,
            interval=interval_of(groups, len(measured)),
            groups=groups,
        )

    def _evaluator_info(self, keys: list[np.ndarray]) -> EvaluatorInfo:
        subject, contexts = self.evaluator, self.contexts
        return EvaluatorInfo(
            **subject.described(contexts.long),
            long_context=contexts.long,
            short_context=contexts.short,
            stride=contexts.stride,
            alpha=self.alpha,
            beta=self.beta,
            tokens=sum(len(of_document) for of_document in keys),
            key_tokens=sum(int(of_document.sum()) for of_document in keys),
        )


def plan_of(request: LongPerplexityRequest, models: ModelRegistry, settings: Settings) -> LongPerplexityPlan:
    """Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    asked = request.evaluator
    served = models.get(request.model)
    named = served if asked.model is None else models.get(asked.model, "evaluator.model")
    evaluator = models.for_method(named, asked.pe)
    shared = {
        name: getattr(request, name)
        for name in ("model", "methods", "lengths", "input", "names", "max_tokens", "protocol", "windows", "bos")
    }
    asked_of = PerplexityRequest(**shared, short_documents=request.short_documents).read_from(request.least())
    measured = perplexity_plan_of(asked_of, models, settings)
    most = evaluator.engine.scores.most
    long = request.long_context or min(evaluator.trained_length, most)
    if long > most:
        why = f"{long} is beyond what this server scores: at most {most} tokens{bounded_by(most, settings)}"
        raise InvalidEvaluation("long_context", why)
    contexts = contexts_of(long, request.short_context, request.stride)
    try:
        method = evaluator.patch.confirmed(asked.pe, contexts.long)
        evaluator.patch.resolve(method, contexts.long)
    except ValueError as error:
        raise InvalidEvaluation("evaluator.pe", str(error)) from error
    same_tokens(request, served, evaluator, measured, settings)
    plan = LongPerplexityPlan(
        measured=measured,
        evaluator=Subject(method, evaluator.patch, evaluator.name, most, evaluator.score_room),
        contexts=contexts,
        alpha=request.alpha,
        beta=request.beta,
    )
    affordable(plan, settings)
    return plan


def same_tokens(
    request: LongPerplexityRequest,
    served: ServedModel,
    evaluator: ServedModel,
    measured: PerplexityPlan,
    settings: Settings,
) -> None:
    """Raises:
    InvalidEvaluation: when the evaluator reads the documents as other tokens than the model does.
    """
    if evaluator is served:
        return
    same = evaluator.tokenizer.get_vocab() == served.tokenizer.get_vocab()
    if same:
        special = 0 if measured.bos is None else 1
        theirs, _ = documents_by_length(request, evaluator, special, settings)
        same = [d.token_ids for d in theirs] == [d.token_ids for d in measured.documents]
    if not same:
        raise InvalidEvaluation(
            "evaluator.model",
            f"{evaluator.name} has another tokenizer than {served.name}: key tokens cannot be carried over",
        )
