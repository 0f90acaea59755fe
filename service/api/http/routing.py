"""Every route: its body is read within limits and checked off the event loop. Its work ends with its client.

It refuses query parameters that it does not declare. On routes of the OpenAI API, it refuses the names of fields.

FastAPI parses and validates bodies on the event loop: megabytes of JSON would stop every other answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Coroutine, Iterable
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel

from patches import not_json
from service import context
from service.api.http.queries import check_no_field, check_query, declared, repeated
from service.api.http.streaming import unless_disconnected
from service.errors import MAX_CHARS, ApiError, Trail, bad_request, check_text, refusal_at, shutting_down
from service.sharing.admission import Admission
from service.sharing.workers import Workers

SMALL = 16 << 10
"""Bytes of a body that the event loop reads and checks by itself, within a millisecond."""

MOST_VALUES = 1 << 18
"""Values in one body: parsing them holds the interpreter all the while, for a quarter of a microsecond each."""

MOST_STRINGS, MOST_FIELDS = 1 << 16, 1 << 14
"""Strings, and fields of all objects, in one body: they take ten times as long."""

MOST_KEYS = 256
"""Keys of one object; each unknown one would be a separate problem."""

SCHEMAS = frozenset({"input", "input_schema", "json", "parameters", "schema"})
"""Fields of JSON schemas and of inputs of tools, whose keys are no fields of ours. Their size is bounded otherwise."""

OPENAI = "/v1/"
"""Routes of the OpenAI API, to which gateways and clients add query parameters. These have no effect here, so those
that are named as a field are refused."""

MAX_SHOWN = 64
"""Characters of a wrong header that are repeated."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Route(APIRoute):
    """Bodies of prompts, up to ``max_prompt_bytes``."""

    limit = "max_prompt_bytes"
    """The setting that bounds the body."""

    def get_route_handler(self) -> Handler:
        handler, validate = super().get_route_handler(), self._validated
        known, takes_any, fields = declared(self.dependant), self.path.startswith(OPENAI), self._fields()

        async def answer(request: Request) -> Response:
            if takes_any:
                check_no_field(request, fields)
            else:
                check_query(request, known)
            if self.body_field is None:
                return await unless_disconnected(request, handler(request))
            _check_not_compressed(request)
            raw = await _read(request, self.limit)
            return await unless_disconnected(request, _then(validate(request, raw), handler))

        return answer

    def _fields(self) -> Collection[str]:
        body = None if self.body_field is None else self.body_field.field_info.annotation
        return body.model_fields if isinstance(body, type) and issubclass(body, BaseModel) else ()

    async def _validated(self, request: Request, raw: bytes) -> Request:
        if not raw:
            return _Checked(request, raw)
        if not _is_json(request):
            raise _not_json(request)
        if len(raw) <= SMALL:
            return _Checked(request, b"{}", self._value(raw))
        workers: Workers = request.app.state.workers
        return _Checked(request, b"{}", await workers.run(self._value, raw))

    def _value(self, raw: bytes) -> Any:
        """The body as the route's own type.

        Raises:
            ApiError, RequestValidationError: naming the field and what is allowed.
        """
        assert self.body_field is not None
        value = _parsed(raw)
        check_shape(value)
        if SURROGATE.search(raw):
            check_text(value)
        checked, problems = self.body_field.validate(value, {}, loc=("body",))
        if problems:
            raise RequestValidationError(problems)
        return checked


class DocumentsRoute(Route):
    """Bodies of documents, up to ``max_body_bytes``."""

    limit = "max_body_bytes"


async def _then(checked: Coroutine[Any, Any, Request], handler: Handler) -> Response:
    return await handler(await checked)


class _Checked(Request):
    """A request whose body has been read, and checked where it is JSON."""

    def __init__(self, request: Request, raw: bytes, value: Any = None) -> None:
        super().__init__(request.scope, request.receive)
        self._raw, self._value = raw, value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


def _is_json(request: Request) -> bool:
    message = Message()
    message["content-type"] = request.headers.get("content-type", "")
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))


def _not_json(request: Request) -> ApiError:
    sent = request.headers.get("content-type", "")[:MAX_SHOWN]
    instead = f", not {sent!r}" if sent else ""
    return bad_request(f"a body needs the header Content-Type: application/json{instead}", code="invalid_request")


def _check_not_compressed(request: Request) -> None:
    """Raises:
    ApiError: 415 for a compressed body, which is not read.
    """
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip()
    if encoding.lower() not in {"", "identity"}:
        message = f"the body is not read in the Content-Encoding {encoding[:MAX_SHOWN]!r}: send it as it is"
        raise ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})


async def _read(request: Request, limit: str) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 for one beyond the limit, 408 for one that does not come, 503 when the server ends meanwhile.
    """
    settings = request.app.state.settings
    most: int = getattr(settings, limit)
    declared = request.headers.get("content-length", "")
    expected = int(declared) if declared.isdigit() else most
    if expected > most:
        raise _too_large(most)
    await _room(request, expected if declared else most)
    reading = asyncio.ensure_future(_whole(request, most))
    draining = asyncio.ensure_future(request.app.state.traffic.drained.wait())
    try:
        await asyncio.wait({reading, draining}, timeout=settings.send_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        if draining.done():
            raise shutting_down()
        message = f"the body did not arrive within {settings.send_timeout_s:g} seconds"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"})
    finally:
        for task in (reading, draining):
            task.cancel()


async def _room(request: Request, expected: int) -> None:
    """Wait for memory for a large body; it is held until the answer is complete."""
    if expected <= SMALL:
        return
    bodies: Admission = request.app.state.bodies
    (ticket,) = bodies.enter([expected])
    context.current().cleanup.callback(ticket.leave)
    await ticket.granted.wait()


async def _whole(request: Request, most: int) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise _too_large(most)
    return bytes(found)


def _too_large(most: int) -> ApiError:
    message = f"the body may have at most {most} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _parsed(raw: bytes) -> Any:
    if raw.count(b'"') - raw.count(b'\\"') > 2 * MOST_STRINGS:
        raise bad_request(f"body: may hold at most {MOST_STRINGS} strings", code="invalid_request")
    if count(raw, b",") >= MOST_VALUES:
        message = f"body: may hold at most {MOST_VALUES} values; send long documents as text"
        raise bad_request(message, code="invalid_request")
    if count(raw, b":") > MOST_FIELDS:
        raise bad_request(f"body: may hold at most {MOST_FIELDS} fields of objects", code="invalid_request")
    try:
        # By itself, the library takes halves of surrogate pairs in bytes, and UTF-16.
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_fields)
    except (RecursionError, ValueError) as error:
        raise bad_request(f"body: not valid JSON: {not_json(error)}", code="invalid_request") from None


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = repeated(name for name, _ in pairs)
        raise bad_request(f"{twice[:MAX_CHARS]!r} is given twice in an object", twice, "invalid_request")
    return fields


def count(raw: bytes, mark: bytes) -> int:
    """Count of ``mark`` in JSON outside of strings: a comma between entries, a colon in every field. Small counts
    include strings."""
    found = raw.count(mark)
    if found <= MOST_FIELDS:
        return found
    parts = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    return sum(part.count(mark) for part in parts[::2])


def check_shape(value: Any) -> None:
    """Raises:
    ApiError: naming the field, for an object with more keys than any of ours has.
    """
    found: list[tuple[Any, Trail]] = [(value, ())]
    while found:
        item, trail = found.pop()
        inner: Iterable[tuple[Any, Any]] = ()
        if type(item) is dict:
            if len(item) > MOST_KEYS:
                raise refusal_at(trail, f"an object may have at most {MOST_KEYS} keys")
            inner = ((key, each) for key, each in item.items() if key not in SCHEMAS or type(each) is not dict)
        elif type(item) is list:
            inner = enumerate(item)
        found += [(each, (trail, key)) for key, each in inner if type(each) is dict or type(each) is list]
