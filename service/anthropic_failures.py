"""Failures in the form of Anthropic's API, on its routes and for its clients. No torch here: proxies have it too."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from service import context
from service.context import RequestContext
from service.errors import ApiError, body_of

PATH = "/v1/messages"
OF_OPENAI = ("/v1/chat", "/v1/completions", "/v1/responses")
"""Routes that have OpenAI's form for all clients."""

VERSION_HEADER = "anthropic-version"
"""A header of all requests of Anthropic's clients."""

ID_HEADER = "request-id"

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status. Others are those of the request below 500, and of the server from there on."""

WITHOUT_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Anthropic's client repeats a request without the thread then, with all of the conversation."""


def failure_of(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of a failure, which names the field and the code as on every other route."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said = {**body_of(error)["error"], "type": kind}
    if error.code == "context_length_exceeded":
        said["message"] = _too_long(*(said[name] for name in ("n_prompt_tokens", "n_new_tokens", "n_ctx")))
    if error.param == "thread":
        said["details"] = WITHOUT_THREADS
    return {"type": "error", "error": said, "request_id": request_id}


def _too_long(prompt: int, new: int, n_ctx: int) -> str:
    """The words by which clients of this API know that they have to shorten a conversation."""
    if prompt > n_ctx:
        return f"prompt is too long: {prompt} tokens > {n_ctx} maximum"
    return f"input length and `max_tokens` exceed context limit: {prompt} + {new} > {n_ctx}"


def event_of(error: ApiError) -> tuple[Any, ...]:
    """The last event of a stream that fails."""
    return failure_of(error, context.current().request_id), "error"


def is_from_client(headers: Mapping[str, str]) -> bool:
    """True if a client of Anthropic's API sends these headers."""
    return VERSION_HEADER in headers


def is_of(path: str, headers: Mapping[str, str]) -> bool:
    """True if failures of a request have this form: on these routes, and for these clients on others of ``/v1``."""
    if _is_under(path, PATH):
        return True
    return is_from_client(headers) and _is_under(path, "/v1") and not _is_under(path, *OF_OPENAI)


def _is_under(path: str, *folders: str) -> bool:
    return path in folders or path.startswith(tuple(f"{folder}/" for folder in folders))


def adapt(current: RequestContext, path: str, headers: Mapping[str, str]) -> None:
    """Give a request to these routes the form of their failures, and the header in which clients read its id."""
    if is_of(path, headers):
        current.shape = partial(failure_of, request_id=current.request_id)
        current.headers[ID_HEADER] = current.request_id
