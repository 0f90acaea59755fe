"""The shape of every refusal and failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict


class ErrorInfo(BaseModel):
    """``param`` is the field at fault; further keys hold numbers, as of a context that is too long."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every refusal and failure, as an answer and as an event of a stream."""

    error: ErrorInfo


WHAT_FAILS: dict[int, str] = {
    400: "The request cannot be answered as it is; `param` names the field and `message` what is allowed.",
    401: "No valid API key.",
    404: "No such model, alias, method or result.",
    413: "The body is larger than this server takes.",
    429: "The queue is full, or the API key has used up its share: come back after `Retry-After`.",
    503: "Not now: starting, shutting down, or short of memory beside others.",
    504: "Not finished within the request's `timeout_s`.",
    507: "Out of memory with nothing else running: make the request smaller.",
}
"""Meanings of the statuses of refusals and failures."""

COMES_BACK = {"Retry-After": {"description": "Seconds after which to ask again.", "schema": {"type": "integer"}}}


def failures(statuses: Iterable[int] = WHAT_FAILS) -> dict[int | str, dict[str, Any]]:
    """Documentation of ``statuses``, and of any other failure: FastAPI would document its own 422, which this
    server never answers.

    One of them has the model. FastAPI builds it again for each route and status, in half of a server's first answer.
    """
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}}}
    documented: dict[int | str, dict[str, Any]] = {
        status: {
            "description": WHAT_FAILS[status],
            **({"headers": COMES_BACK} if status in (429, 503) else {}),
            "content": content,
        }
        for status in statuses
    }
    return {**documented, "default": {"model": ErrorResponse, "description": "Any other failure, in the same shape."}}
