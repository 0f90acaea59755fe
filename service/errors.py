"""Every failure as one JSON shape: {"error": {"message", "type", "param", "code"}}.

Bodies are bounded: at most 10 problems of 200 characters each, so that a malformed request cannot be
answered with a megabyte of echo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from patches import METHODS, SlotsExhausted
from service.engine.admission import QueueFull, TooLarge
from service.engine.engine import EngineFailed
from service.evaluation.planning import InvalidEvaluation
from service.inputs import TAGS
from service.models.registry import UnknownModel

MAX_PROBLEMS = 10
MAX_CHARS = 200

log = structlog.get_logger()


class ApiError(Exception):
    """A refusal with its status, the field at fault and a code that clients can match."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """The one table from exceptions to statuses; anything unexpected is an opaque 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors())
    if isinstance(error, UnknownModel):
        served = ", ".join(error.known)
        return ApiError(404, f"{error}; served: {served}", param="model", code="model_not_found")
    if isinstance(error, TooLarge):
        message = f"this request needs {error.needed} tokens of memory and the cache holds {error.capacity}"
        return bad_request(message, code="context_length_exceeded")
    if isinstance(error, InvalidEvaluation):
        return bad_request(str(error), error.param)
    if isinstance(error, QueueFull):
        return ApiError(429, f"the queue is full: {error}", code="queue_full")
    if isinstance(error, SlotsExhausted):
        return ApiError(503, f"too many different encodings at once: {error}", code="slots_exhausted")
    if isinstance(error, EngineFailed):
        return ApiError(503, f"the engine failed and is restarting: {error}", code="engine_failed")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code="http_error")
    return ApiError(500, "internal error", code="internal_error")


def validation_error(problems: Sequence[Any]) -> ApiError:
    """One message from pydantic's list: field, what is wrong, what is allowed."""
    lines = [f"{_field(problem['loc'])}: {problem['msg']}"[:MAX_CHARS] for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"and {len(problems) - MAX_PROBLEMS} more")
    param = _field(problems[0]["loc"])[:MAX_CHARS] if problems else None
    return bad_request("; ".join(lines), param=param, code="invalid_request")


def _field(location: Sequence[int | str]) -> str:
    """Dotted path of a field, without what unions and validators put into pydantic's locations."""
    noise = {"body", "query", "path", *TAGS, *METHODS}
    parts = [str(part) for part in location if part not in noise and "[" not in str(part)]
    return ".".join(parts) or "body"


def body_of(error: ApiError) -> dict[str, Any]:
    """The JSON body, also used inside event streams."""
    kind = "invalid_request_error" if error.status < 500 and error.status != 429 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    message = error.message[: (MAX_PROBLEMS + 1) * MAX_CHARS]
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def response_of(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return JSONResponse(body_of(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every exception of the app with the one shape."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        answer = as_api_error(error)
        if answer.status >= 500:
            log.error("request_failed", path=request.url.path, code=answer.code, exc_info=error)
        return response_of(answer)

    kinds: tuple[type[Exception], ...] = (Exception, ApiError, RequestValidationError, HTTPException)
    for kind in (*kinds, UnknownModel, InvalidEvaluation, TooLarge, QueueFull, SlotsExhausted, EngineFailed):
        app.add_exception_handler(kind, handle)
