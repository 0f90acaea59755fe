"""Every failure as one JSON shape: {"error": {"message", "type", "param", "code"}}.

Bodies are bounded: a malformed request never gets a megabyte of echo.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Mount

from patches import InvalidEncoding, SlotsExhausted
from service import context
from service.api.validation import problems_in, validation_error
from service.engine.choice import CannotGenerate
from service.engine.failures import EngineFailed, EngineStopping
from service.engine.thread.out_of_memory import OutOfMemory
from service.errors import (
    CLIENT_CLOSED_REQUEST,
    CLIENT_DISCONNECTED,
    MAX_CHARS,
    ApiError,
    ClientGone,
    ClientTooSlow,
    bad_request,
    body_of,
    context_length_exceeded,
    rank_lost,
    shutting_down,
)
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.scoring.token_scores import NotANumber
from service.jobs.database.opening import NotStorable, StoreOutOfReach
from service.jobs.storage.refusals import (
    IdempotencyMismatch,
    JobDone,
    JobUnfinished,
    ResultDamaged,
    TooManyJobBytes,
    TooManyJobs,
    UnknownCursor,
    UnknownJob,
)
from service.models.parallel import LOST
from service.models.registry import UnknownModel
from service.sharing.admission import QueueFull, TooLarge
from service.sharing.limits import LimitsOutOfReach
from service.sharing.stopping import Stopped

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

log = structlog.get_logger()


def as_api_error(error: Exception) -> ApiError:
    """The one table from exceptions to statuses; anything unexpected is an opaque 500."""
    if isinstance(error, ClientTooSlow):  # no part of the table: Starlette answers its kinds, and this answer has begun
        return ApiError(CLIENT_CLOSED_REQUEST, str(error), code="client_too_slow")
    for kind, convert in _CONVERSIONS.items():
        if isinstance(error, kind):
            return convert(error)
    return ApiError(500, "internal error", code="internal_error")


def _http_error(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)


def _out_of_memory(error: OutOfMemory) -> ApiError:
    if error.alone:
        return ApiError(507, f"{error}, with nothing else running: make the request smaller", code="out_of_memory")
    return ApiError(503, f"{error}, beside others: try again", code="out_of_memory", headers={"Retry-After": "5"})


def _unknown_model(error: UnknownModel) -> ApiError:
    before = "" if error.param == "model" else f"{error.param}: "
    message = f"{before}{error}; served: {', '.join(error.known)}"
    return ApiError(404, message, param=error.param, code="model_not_found")


def _client_gone(_: Exception) -> ApiError:
    return ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection", code=CLIENT_DISCONNECTED)


_CONVERSIONS: dict[type[Exception], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    RequestValidationError: lambda error: validation_error(problems_in(error.errors())),
    InvalidEncoding: lambda error: validation_error(error.problems),
    UnknownModel: _unknown_model,
    CannotGenerate: lambda error: bad_request(str(error), "model", "cannot_generate"),
    TooLarge: lambda error: context_length_exceeded(error.needed, 0, error.capacity),
    UnknownJob: lambda error: ApiError(404, str(error), code="not_found"),
    UnknownCursor: lambda error: bad_request(str(error), "before"),
    InvalidEvaluation: lambda error: bad_request(str(error), error.param),
    IdempotencyMismatch: lambda error: ApiError(422, str(error), code="idempotency_mismatch", param="Idempotency-Key"),
    JobDone: lambda error: ApiError(409, str(error), code="job_done"),
    JobUnfinished: lambda error: ApiError(409, str(error), code="job_unfinished"),
    ResultDamaged: lambda error: ApiError(409, str(error), code="result_damaged"),
    TooManyJobs: lambda error: ApiError(429, str(error), code="too_many_jobs"),
    TooManyJobBytes: lambda error: ApiError(429, str(error), code="too_many_job_bytes"),
    QueueFull: lambda error: ApiError(429, f"the queue is full: {error}", code="queue_full"),
    SlotsExhausted: lambda error: ApiError(503, str(error), code="slots_exhausted"),
    EngineStopping: lambda error: shutting_down(),
    Stopped: lambda error: shutting_down(),
    StoreOutOfReach: lambda error: ApiError(
        503, "the database of jobs is out of reach: try again", code="jobs_out_of_reach", headers={"Retry-After": "5"}
    ),
    NotStorable: lambda error: ApiError(500, str(error), code="not_storable"),
    LimitsOutOfReach: lambda error: ApiError(
        503, "the shared store of limits is out of reach: try again", code="limits_out_of_reach"
    ),
    EngineFailed: lambda error: (
        rank_lost()
        if LOST.is_set()
        else ApiError(503, f"the engine failed and is restarting: {error}", code="engine_failed")
    ),
    OutOfMemory: _out_of_memory,
    NotANumber: lambda error: ApiError(500, str(error), code="not_a_number"),
    ClientGone: _client_gone,
    ClientDisconnect: _client_gone,
    HTTPException: _http_error,
}


def response_of(error: ApiError) -> JSONResponse:
    """The answer in the form of its route, with the header that clients retry by: openai's client repeats any 5xx."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    elif error.status in (504, 507):
        headers["x-should-retry"] = "false"
    body = (context.current().shape or body_of)(error)
    return JSONResponse(body, status_code=error.status, headers=headers | dict(error.headers))


def report(error: Exception) -> ApiError:
    """The answer to ``error``: its code goes to the request's log line, the server's own faults are logged here."""
    api_error = as_api_error(error)
    context.current().error_code = api_error.code or "error"
    if api_error.status == 500:
        log.error("request_failed", code=api_error.code, exc_info=error)
    elif api_error.status > 500:
        # Reasons name addresses and files, which are not for clients.
        told = str(error) if isinstance(error, StoreOutOfReach | LimitsOutOfReach) else api_error.message
        log.warning("request_failed", code=api_error.code, error=told[:MAX_CHARS])
    return api_error


def answer(error: Exception) -> JSONResponse:
    """Report ``error`` and answer with it."""
    return response_of(report(error))


def install(app: FastAPI) -> None:
    """Answer every exception of the app with the one shape."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 404:
            error.detail = _no_route(request)
        elif isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"Allow": ", ".join(_allowed(request))}
        return answer(error)

    kinds: list[type[Exception]] = [Exception, *_CONVERSIONS]
    for kind in kinds:
        app.add_exception_handler(kind, handle)


def _no_route(request: Request) -> str:
    """The path, which no route has, and the nearest one."""
    near = difflib.get_close_matches(request.url.path[:MAX_CHARS], getattr(request.app.state, "paths", ()), 1, 0.8)
    return f"no route {request.url.path[:MAX_CHARS]!r}: " + (f"did you mean {near[0]}?" if near else "see /docs")


def _allowed(request: Request) -> list[str]:
    """Methods of the path. By itself, Starlette names those of its first route."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]

    def takes(method: str) -> bool:
        return any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)

    found = [method for method in METHODS if takes(method)] or ["GET"]  # files are mounted
    return ["GET", "HEAD", *found[1:]] if found[0] == "GET" else found
