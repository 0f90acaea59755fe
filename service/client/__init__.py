"""A Ropeway server from Python: ``Ropeway`` and ``AsyncRopeway``, with typed answers, retries and one exception.

Importing this loads no model library, and neither does an encoding in the short form (``"yarn:4"``).
"""

from __future__ import annotations

from service.api.response_models.encodings import ExportResult, MethodInfo
from service.api.response_models.generation import GenerateResponse, PrefillProgress, Result, ResultEnd, TextDelta
from service.api.response_models.models import ModelInfo, Ready
from service.client.asynchronous import AsyncRopeway
from service.client.errors import RopewayError
from service.client.events import StreamEvent
from service.client.synchronous import Ropeway
from service.evaluation.comparison.results import ComparisonResult
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult, Progress
from service.jobs.records import JobInfo, UnitDone

__all__ = [
    "AsyncRopeway",
    "ComparisonResult",
    "EvaluationResult",
    "ExportResult",
    "GenerateResponse",
    "JobInfo",
    "MethodInfo",
    "ModelInfo",
    "PerplexityResult",
    "PrefillProgress",
    "Progress",
    "Ready",
    "Result",
    "ResultEnd",
    "Ropeway",
    "RopewayError",
    "StreamEvent",
    "TextDelta",
    "UnitDone",
]
