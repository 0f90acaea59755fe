"""``RopewayError``, the one exception of the client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from httpx_sse import SSEError
from pydantic_core import PydanticCustomError

SENT_AGAIN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Connections that failed before an answer. Read timeouts are not among them: the work may still run."""


class RopewayError(Exception):
    """A refusal or a failure. ``status`` is None without an answer, and for a failure in the middle of one.

    ``code`` and ``param`` come from the server; the client adds the codes ``connection_error``, ``timeout``,
    ``incomplete_answer`` and ``invalid_answer``. ``retry_after`` is the server's ``Retry-After`` in seconds,
    ``request_id`` the id in the server's log. ``transient`` is true when a retry may succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        transient: bool = False,
    ) -> None:
        named = param is None or re.match(rf"['`]?{re.escape(param)}(?!\w)", message)
        super().__init__(message if named else f"{param}: {message}")
        headers = headers or {}
        self.status, self.code, self.param, self.message = status, code, param, message
        self.retry_after = _seconds(headers.get("retry-after"))
        self.request_id = headers.get("x-request-id")
        self.transient = {"true": True, "false": False}.get(headers.get("x-should-retry", ""), transient)


def refusal(response: httpx.Response) -> RopewayError:
    """The error in a response that has been read."""
    status = response.status_code
    given: dict[str, Any] = {"status": status, "headers": response.headers, "transient": status in (429, 503)}
    try:
        return _error(response.json()["error"], **given)
    except (ValueError, KeyError, TypeError):
        message = f"{response.request.url} answered {status} {response.reason_phrase}"
        return RopewayError(message, **given)


def in_stream(error: Any, response: httpx.Response) -> RopewayError:
    """The error in an event."""
    try:
        return _error(error, headers=response.headers)
    except (KeyError, TypeError):
        return RopewayError("the server ended the answer with an error", headers=response.headers)


def incomplete(response: httpx.Response | None = None) -> RopewayError:
    message = "the server ended the answer before it was complete"
    return RopewayError(message, code="incomplete_answer", headers=None if response is None else response.headers)


@contextmanager
def translated(server: httpx.URL | str) -> Iterator[None]:
    """Turns exceptions of httpx into ``RopewayError``."""
    try:
        yield
    except SSEError as error:
        raise RopewayError(f"no event stream from {server}: {error}", code="invalid_answer") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        code = "timeout" if isinstance(error, httpx.TimeoutException) else "connection_error"
        message = f"no answer from {server}: {error or type(error).__name__}"
        raise RopewayError(message, code=code, transient=isinstance(error, SENT_AGAIN)) from error


@contextmanager
def written(body: Any) -> Iterator[None]:
    """Turns exceptions about what no request can have, such as NaN in ``body``, into ``RopewayError``."""
    try:
        yield
    except UnicodeEncodeError as error:
        from patches import check_text  # NumPy comes with it

        try:
            check_text(json.loads(json.dumps(body)))  # the exception has a place in JSON, and no field
        except PydanticCustomError as half:
            field, message = (half.context or {})["field"], (half.context or {})["message"]
            raise RopewayError(f"{field}: {message}", code="invalid_request", param=field) from error
        raise
    except (TypeError, ValueError) as error:
        raise RopewayError(f"the request cannot be written: {error}", code="invalid_request") from error


def _error(fields: dict[str, Any], **given: Any) -> RopewayError:
    return RopewayError(str(fields["message"]), code=fields.get("code"), param=fields.get("param"), **given)


def _seconds(text: str | None) -> float | None:
    """``Retry-After`` in seconds, from a number or a date; None for anything else."""
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None
