"""The bodies of every evaluation by its name. Light: the shell checks one before it loads a model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from service.evaluation.long_perplexity.request import LongPerplexityRequest
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.probe.request import ProbeRequest
from service.evaluation.request import EvaluationRequest
from service.evaluation.retrieval.request import NeedleRequest, PasskeyRequest
from service.evaluation.ruler.request import RulerRequest
from service.evaluation.sweep.request import SweepRequest

_ALL: tuple[type[EvaluationRequest], ...] = (
    PerplexityRequest,
    LongPerplexityRequest,
    PasskeyRequest,
    NeedleRequest,
    RulerRequest,
    ProbeRequest,
    SweepRequest,
)

BODIES = {str(kind.model_fields["evaluation"].default): kind for kind in _ALL}

AnyRequest = Annotated[
    PerplexityRequest
    | LongPerplexityRequest
    | PasskeyRequest
    | NeedleRequest
    | RulerRequest
    | ProbeRequest
    | SweepRequest,
    Field(discriminator="evaluation"),
]
"""The body of any evaluation, told apart by ``evaluation``."""
