"""Server-sent events as the values they carry."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import httpx
from httpx_sse import ServerSentEvent
from pydantic import BaseModel, ValidationError

from service.api.answers import PrefillProgress, ResultEnd, TextDelta
from service.client.errors import RopewayError, in_stream, refusal
from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import EvaluationResult
from service.jobs.records import JobInfo, UnitDone

StreamEvent = TextDelta | PrefillProgress | ResultEnd
"""What ``stream`` gives: text as it comes, how far a long prompt has been read, and how a result ended."""

T = TypeVar("T", bound=BaseModel)


def read(kind: type[T], response: httpx.Response) -> T:
    """The answer in a response that has been read.

    Raises:
        RopewayError: for a refusal, and for what is no answer of a Ropeway server.
    """
    if not response.is_success:
        raise refusal(response)
    return typed(kind, json_of(response), response)


def json_of(response: httpx.Response) -> Any:
    """The JSON of an answer.

    Raises:
        RopewayError: for what is no JSON.
    """
    try:
        return response.json()
    except ValueError as error:
        raise _unexpected(response) from error


def payload(event: ServerSentEvent, response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an event.

    Raises:
        RopewayError: the one that the event is, or ``invalid_answer``.
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
        RopewayError: when it is none.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _unexpected(response) from error


def stream_event(event: ServerSentEvent, response: httpx.Response) -> StreamEvent:
    """One event of a generation.

    Raises:
        RopewayError: when it carries an error or nothing known.
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
        RopewayError: when it carries an error or nothing known.
    """
    value = payload(event, response)
    if event.event == "unit":
        return typed(UnitDone, value, response)
    return typed(JobInfo, value, response)


def typed_result(value: Any, response: httpx.Response) -> EvaluationResult:
    """The result of whichever evaluation it is.

    Raises:
        RopewayError: when it is of none that is known.
    """
    evaluation = EVALUATIONS.get(str(value.get("evaluation"))) if isinstance(value, dict) else None
    if evaluation is None:
        raise _unexpected(response)
    return typed(evaluation.result, value, response)


def _unexpected(response: httpx.Response) -> RopewayError:
    message = f"{response.request.url} gave an answer that this client does not know"
    return RopewayError(message, status=response.status_code, code="invalid_answer", headers=response.headers)
