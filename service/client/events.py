"""Answers and server-sent events as typed values."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import httpx
from httpx_sse import ServerSentEvent
from pydantic import BaseModel, ValidationError

from service.api.response_models.generation import PrefillProgress, ResultEnd, TextDelta
from service.client.errors import RopewayError, in_stream
from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import EvaluationResult
from service.jobs.records import JobInfo, UnitDone

StreamEvent = TextDelta | PrefillProgress | ResultEnd
"""Items of ``stream``: text, progress of a long prompt, and the end of a result."""

T = TypeVar("T", bound=BaseModel)


def read(kind: type[T], response: httpx.Response) -> T:
    """The answer in a successful response that has been read.

    Raises:
        RopewayError: ``invalid_answer``, when the answer is not of a Ropeway server.
    """
    return typed(kind, json_of(response), response)


def json_of(response: httpx.Response) -> Any:
    """The JSON of an answer.

    Raises:
        RopewayError: ``invalid_answer``, when it is not JSON.
    """
    try:
        return response.json()
    except ValueError as error:
        raise _unexpected(response) from error


def payload(event: ServerSentEvent, response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an event.

    Raises:
        RopewayError: the error that the event carries, or ``invalid_answer``.
    """
    try:
        value = json.loads(event.data)
    except ValueError as error:
        raise _unexpected(response) from error
    if not isinstance(value, dict):
        raise _unexpected(response)
    if event.event == "message" and "error" in value:
        raise in_stream(value["error"], response)
    return value


def typed(kind: type[T], value: Any, response: httpx.Response) -> T:
    """``value`` as a ``kind``.

    Raises:
        RopewayError: ``invalid_answer``, when it does not validate.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _unexpected(response) from error


def stream_event(event: ServerSentEvent, response: httpx.Response) -> StreamEvent:
    """One event of a generation.

    Raises:
        RopewayError: the error that the event carries, or ``invalid_answer``.
    """
    value = payload(event, response)
    if event.event == "progress":
        return typed(PrefillProgress, value, response)
    if "text" in value:
        return typed(TextDelta, value, response)
    return typed(ResultEnd, value, response)


def job_event(event: ServerSentEvent, response: httpx.Response) -> UnitDone | JobInfo:
    """One event of a job.

    Raises:
        RopewayError: the error that the event carries, or ``invalid_answer``.
    """
    value = payload(event, response)
    if event.event == "unit":
        return typed(UnitDone, value, response)
    return typed(JobInfo, value, response)


def typed_result(value: Any, response: httpx.Response) -> EvaluationResult:
    """The result of the evaluation that ``value`` names.

    Raises:
        RopewayError: ``invalid_answer``, when the evaluation is unknown.
    """
    evaluation = EVALUATIONS.get(str(value.get("evaluation"))) if isinstance(value, dict) else None
    if evaluation is None:
        raise _unexpected(response)
    return typed(evaluation.result, value, response)


def _unexpected(response: httpx.Response) -> RopewayError:
    message = f"{response.request.url} gave an answer that this client does not know; the server may be another version"
    return RopewayError(message, status=response.status_code, code="invalid_answer", headers=response.headers)
