"""The results of every evaluation by its name. Light: a client reads answers without the code that makes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.evaluation.long_perplexity.results import LongPerplexityResult
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.probe.results import ProbeResult
from service.evaluation.results import EvaluationResult
from service.evaluation.retrieval.results import NeedleResult, PasskeyResult
from service.evaluation.ruler.results import RulerResult
from service.evaluation.sweep.results import SweepResult

_ALL: tuple[type[EvaluationResult], ...] = (
    PerplexityResult,
    LongPerplexityResult,
    PasskeyResult,
    NeedleResult,
    RulerResult,
    ProbeResult,
    SweepResult,
)

RESULTS = {str(kind.model_fields["evaluation"].default): kind for kind in _ALL}

AnyResult = Annotated[
    PerplexityResult | LongPerplexityResult | PasskeyResult | NeedleResult | RulerResult | ProbeResult | SweepResult,
    Field(discriminator="evaluation"),
]
"""The result of any evaluation, told apart by ``evaluation``."""
