"""Talking to a server: requests, server-sent events, and refusals as one exception."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from service.cli.server import StartFailed, local_server, settings_with
from service.cli.terminal import fail, status


class Refused(Exception):
    """The server answered with an error; the message names the field at fault."""


@contextmanager
def connected(server: str | None, model: str | None = None) -> Iterator[httpx.Client]:
    """A client of ``server``; without one, of a server started here for as long as it is used.

    ``model`` is what the server started here loads. Failures that a user can cause end the command
    with a message and exit code 1.
    """
    try:
        with ExitStack() as stack:
            if server is None:
                settings = settings_with(model=model)
                with status(f"loading {settings.model}"):
                    url = stack.enter_context(local_server(settings))
            else:
                url = server if "://" in server else f"http://{server}"
            yield stack.enter_context(client_of(url, trust_env=server is not None))
    except (Refused, StartFailed) as error:
        fail(str(error))
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        fail(f"no answer from {server or 'the server started here'}: {error}")


def client_of(url: str, *, trust_env: bool = False) -> httpx.Client:
    """A client without a limit on answers, which take as long as they take; loopback ignores proxies."""
    return httpx.Client(base_url=url, timeout=httpx.Timeout(None, connect=10), trust_env=trust_env)


def ask(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON answer.

    Raises:
        Refused: when the answer is an error.
    """
    response = client.request(method, path, json=body)
    _check(response)
    return response.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(event name, data) of a streamed POST until ``[DONE]``; unnamed events are ``message``.

    Raises:
        Refused: when the answer or an event is an error, or the stream ends before it is done.
    """
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.is_error:
            response.read()
        _check(response)
        for name, data in _events(response.iter_bytes()):
            if data == "[DONE]":
                return
            value = json.loads(data)
            if name == "message" and "error" in value:
                raise Refused(_message(value["error"]))
            yield name, value
    raise Refused("the server ended the answer before it was complete")


def _events(chunks: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    """Lines are split at newlines only: httpx would also split at characters that JSON leaves as they are."""
    name, data, rest = "message", "", b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field, _, value = line.decode().rstrip("\r").partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data = f"{data}\n{value}" if data else value
            elif not field and not value and data:
                yield name, data
                name, data = "message", ""


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.request.url} answered {response.status_code} {response.reason_phrase}"
    raise Refused(message)


def _message(error: dict[str, Any]) -> str:
    message, param = str(error["message"]), error.get("param")
    return message if param is None or param in message else f"{param}: {message}"
