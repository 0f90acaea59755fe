"""Every evaluation: a folder beside this file and a line in its table.

The table loads no evaluation. The shell's help and the client read it without the code that plans and draws.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from service.evaluation.request import EvaluationRequest
    from service.evaluation.results import EvaluationResult
    from service.evaluation.unit import Plan
    from service.models.registry import ModelRegistry
    from service.settings import Settings

OPTION = "x-option"
"""In the schema of a field, the name of its option in the shell where that is another."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation by the ``name`` in routes, commands and ``evaluation`` fields.

    Its ``folder`` (the name when empty) has three modules. For ``long_perplexity``: ``request.py`` with
    ``LongPerplexityRequest``, ``results.py`` with ``LongPerplexityResult``, and ``plan.py`` with ``plan_of``.
    ``chooses`` is true if its result is also a policy of ``auto``. ``proposes`` describes the encodings of a request
    that names none; empty: the model's own. ``drawn_by`` is the import path of a function from a result to its
    pictures. Each is imported on first use.
    """

    name: str
    summary: str
    drawn_by: str
    folder: str = ""
    in_sweeps: bool = True
    chooses: bool = False
    proposes: str = ""

    @property
    def request(self) -> type[EvaluationRequest]:
        """The body of ``POST /NAME``."""
        kind: type[EvaluationRequest] = self._named("request", f"{self._prefix}Request")
        return kind

    @property
    def result(self) -> type[EvaluationResult]:
        """The answer to that request."""
        kind: type[EvaluationResult] = self._named("results", f"{self._prefix}Result")
        return kind

    @property
    def plan(self) -> Callable[[Any, ModelRegistry, Settings], Plan]:
        """A request as a plan; raises UnknownModel and InvalidEvaluation."""
        function: Callable[[Any, ModelRegistry, Settings], Plan] = self._named("plan", "plan_of")
        return function

    @property
    def pictures(self) -> Callable[[Any], Iterable[Any]]:
        """The pictures of a result (``figures.picture.Picture``), the main one first."""
        function: Callable[[Any], Iterable[Any]] = resolve_name(self.drawn_by)
        return function

    @property
    def _prefix(self) -> str:
        return self.name.title().replace("_", "")

    def _named(self, module: str, name: str) -> Any:
        return resolve_name(f"service.evaluation.{self.folder or self.name}.{module}:{name}")


_ALL = (
    Evaluation(
        "perplexity",
        "Perplexity of documents by context length.",
        "service.figures.evaluations.perplexity:perplexity_pictures",
    ),
    Evaluation(
        "long_perplexity",
        "Perplexity over the tokens that need long context, by context length.",
        "service.figures.evaluations.long_perplexity:long_perplexity_pictures",
    ),
    Evaluation(
        "passkey",
        "Retrieval of a number hidden in filler, by length and depth.",
        "service.figures.evaluations.retrieval:retrieval_pictures",
        folder="retrieval",
    ),
    Evaluation(
        "needle",
        "Retrieval of a sentence hidden in documents, by length and depth.",
        "service.figures.evaluations.retrieval:retrieval_pictures",
        folder="retrieval",
    ),
    Evaluation(
        "ruler",
        "RULER's synthetic tasks by length, and the effective length.",
        "service.figures.evaluations.ruler:ruler_pictures",
    ),
    Evaluation(
        "probe",
        "Attention by distance, copying by distance, loss by position.",
        "service.figures.evaluations.probe:probe_pictures",
        in_sweeps=False,
    ),
    Evaluation(
        "sweep",
        "Methods, factors, lengths and evaluations at once: the best method, and the cheapest adequate one.",
        "service.figures.evaluations.sweep:sweep_pictures",
        in_sweeps=False,
    ),
    Evaluation(
        "recommend",
        "The encoding to use for a model and a length, with the evidence for it.",
        "service.figures.evaluations.recommend:recommend_pictures",
        in_sweeps=False,
        chooses=True,
        proposes="the candidates of all methods",
    ),
    Evaluation(
        "search",
        "A search for the factors of each rotary pair at a length, compared on text that it never reads.",
        "service.figures.evaluations.search:search_pictures",
        in_sweeps=False,
        proposes="the methods that begin the search",
    ),
)

EVALUATIONS = {evaluation.name: evaluation for evaluation in _ALL}

IN_SWEEPS = tuple(evaluation for evaluation in _ALL if evaluation.in_sweeps)
"""The evaluations that a sweep can combine; the first one is its default."""


def union_of(kinds: Iterable[type[Any]]) -> Any:
    """A pydantic type for any of several requests or results, discriminated by ``evaluation``."""
    from pydantic import Field

    return Annotated[reduce(or_, kinds), Field(discriminator="evaluation")]


def any_request() -> Any:
    """The union of all requests."""
    return union_of(evaluation.request for evaluation in _ALL)


def any_result() -> Any:
    """The union of all results."""
    return union_of(evaluation.result for evaluation in _ALL)


def result_in(packed: bytes, evaluation: str) -> EvaluationResult:
    """The result of an evaluation, or of a comparison of several, from its JSON under gzip."""
    from service.evaluation.comparison.results import ComparisonResult

    kind = EVALUATIONS[evaluation].result if evaluation in EVALUATIONS else ComparisonResult
    return kind.model_validate_json(gzip.decompress(packed))


def plan_of(request: EvaluationRequest, models: ModelRegistry, settings: Settings) -> Plan:
    """The plan of any evaluation.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    return EVALUATIONS[request.evaluation].plan(request, models, settings)
