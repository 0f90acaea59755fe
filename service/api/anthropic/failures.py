"""Failures in the form of Anthropic's API, for its routes."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from typing_extensions import override

from service import context
from service.api.errors import report, response_of
from service.api.http.routing import Handler, Route
from service.errors import ApiError, body_of

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


def failure_of(error: ApiError) -> dict[str, Any]:
    """The body of a failure, which names the field and the code as on every other route."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said = {**body_of(error)["error"], "type": kind}
    return {"type": "error", "error": said, "request_id": context.current().request_id}


def event_of(body: dict[str, Any]) -> tuple[Any, ...]:
    """The last event of a stream that fails with ``body``, in the form of other routes."""
    said = body["error"]
    kind = "api_error" if said["type"] == "server_error" else said["type"]
    return {"type": "error", "error": {**said, "type": kind}}, "error"


class AnthropicRoute(Route):
    """A route whose failures have this form."""

    @override
    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            current = context.current()
            current.headers["request-id"] = current.request_id  # the name that Anthropic's client reads
            try:
                return await handler(request)
            except Exception as error:
                return response_of(report(error), failure_of)

        return answer
