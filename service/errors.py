"""Refusals: an HTTP status, the field at fault, and a code that clients can match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that closed the connection: it appears in logs only."""

CLIENT_DISCONNECTED = "client_disconnected"
"""The code of such a request, in logs and metrics."""

MAX_PROBLEMS = 10
MAX_CHARS = 200
MAX_CHARS_OF_THE_FIRST = 800
"""The first problem may list all that a field takes, such as the names of the methods."""

Trail = tuple[Any, ...]
"""Empty, or the trail of the object around, and a key in it."""


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


class ClientTooSlow(ConnectionError):
    """The client left its answer unread for too long."""


class ApiError(Exception):
    """A refusal with its status, the field at fault and a code that clients can match.

    ``extra`` holds further keys of the error object, for machines; ``headers`` go to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        extra: dict[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.extra, self.headers = extra or {}, headers or {}


def body_of(error: ApiError) -> dict[str, Any]:
    """JSON body of every failure, also used inside event streams."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, kind)
    message = error.message[: MAX_CHARS_OF_THE_FIRST + MAX_PROBLEMS * MAX_CHARS]
    param = None if error.param is None else error.param[:MAX_CHARS]
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code, **error.extra}}


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def check_text(value: Any) -> None:
    """Raises:
    ApiError: naming the field with half a surrogate pair, which is no text and cannot be written as UTF-8.
    """
    found: list[tuple[Any, Trail]] = [(value, ())]
    while found:
        item, trail = found.pop()
        if type(item) is str:
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise refusal_at(trail, f"character {error.start + 1} is half a surrogate pair") from None
        elif type(item) is dict:
            # Keys come last, so they are checked before a trail has them.
            found += [(each, (trail, key)) for key, each in item.items()] + [(key, trail) for key in item]
        elif type(item) is list:
            found += [(each, (trail, index)) for index, each in enumerate(item)]


def refusal_at(trail: Trail, why: str) -> ApiError:
    """The refusal of the field at the end of ``trail``."""
    keys = []
    while trail:
        trail, key = trail
        keys.append(str(key))
    path = ".".join(reversed(keys))
    return bad_request(f"{path[:MAX_CHARS] or 'body'}: {why}", path or None, "invalid_request")


def context_length_exceeded(prompt: int, new: int, n_ctx: int, param: str = "prompt", needed: str = "") -> ApiError:
    """The refusal in the words that clients look for (OpenAI's and llama.cpp's), with its numbers for machines.
    ``needed`` is what the operator can change for longer requests."""
    message = (
        f"the maximum context length is {n_ctx} tokens. The request exceeds the available context size: "
        f"{prompt} tokens in the prompt and {new} new ones"
    )
    if needed:
        message += f". Longer requests need {needed} on this server"
    numbers = {"n_prompt_tokens": prompt, "n_new_tokens": new, "n_ctx": n_ctx}
    return ApiError(400, message, param=param, code="context_length_exceeded", extra=numbers)


def deadline_exceeded(seconds: float) -> ApiError:
    return ApiError(504, f"not finished within {seconds:g} seconds", param="timeout_s", code="deadline_exceeded")


def rank_lost() -> ApiError:
    message = "a rank of the tensor-parallel group was lost, and the server ends"
    return ApiError(503, message, code="rank_lost", headers={"Connection": "close"})


def shutting_down(more: str = "") -> ApiError:
    message = f"the server is shutting down{more and f'; {more}'}"
    return ApiError(503, message, code="shutting_down", headers={"Connection": "close"})
